"""Claims about the options of `keepstep run` that torchrun has too, compared with its parser."""

from __future__ import annotations

import argparse
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from torch.distributed.run import get_args_parser

from keepstep.elastic.cli import launch
from keepstep.elastic.cli.main import main

ROOT = Path(__file__).parents[4]
OWN = {
    parameter.name: parameter
    for parameter in main.commands["run"].params
    if isinstance(parameter, click.Option) and parameter.name is not None
}


def torchrun_options(monkeypatch: pytest.MonkeyPatch) -> dict[str, argparse.Action]:
    """Return torchrun's options by name, each with a value of its PET variable as its default."""
    names = [it.dest for it in get_args_parser()._actions if it.option_strings]
    for name in names:
        monkeypatch.setenv(f"PET_{name.upper()}", "1")
    return {it.dest: it for it in get_args_parser()._actions if it.dest in names}


def received(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, object]:
    """Return the options that `keepstep run` is called with."""
    options: dict[str, object] = {}

    def note(**given: object) -> int:
        options.update(given)
        return 0

    monkeypatch.setattr(launch, "launch", note)
    done = CliRunner().invoke(main, ["run", *arguments, "train.py"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return options


def test_options_that_torchrun_takes_from_variables_are_taken_from_the_same_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_variable = [
        name
        for name, action in torchrun_options(monkeypatch).items()
        if name in OWN and action.default in ("1", True)
    ]
    assert {"nnodes", "nproc_per_node", "rdzv_id", "standalone", "module"} <= set(with_variable)
    for name in OWN:
        monkeypatch.delenv(f"PET_{name.upper()}", raising=False)
    for name in with_variable:
        option = OWN[name]
        value = "null" if isinstance(option.type, click.Choice) else "1"
        with monkeypatch.context() as patch:
            patch.setenv(f"PET_{name.upper()}", value)
            given = received(patch)[name]
        assert given == option.type.convert(value, option, None), name


def test_own_options_have_variables_too_and_the_command_line_overrides_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PET_LEASE_TTL", "7")
    monkeypatch.setenv("PET_NNODES", "2:3")
    assert received(monkeypatch)["lease_ttl"] == 7.0
    assert received(monkeypatch)["nnodes"] == "2:3"
    assert received(monkeypatch, "--nnodes", "4")["nnodes"] == "4"


def test_names_are_spelled_as_torchrun_spells_them_and_missing_ones_are_documented(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (ROOT / "docs" / "run-a-job.md").read_text()
    for name, action in torchrun_options(monkeypatch).items():
        if name in OWN:
            assert set(action.option_strings) <= set(OWN[name].opts), name
        elif name != "help":
            assert f"`--{name.replace('_', '-')}`" in text, name
