"""Options of `convert` that contradict each other, and `rules check` beside `convert --rules`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from keepstep.checkpoint.cli.ckpt import ckpt

OF_DEEPSPEED = "is for --to deepspeed or deepspeed-universal, not for"


@pytest.mark.parametrize(
    ("to", "option", "value", "message"),
    [
        ("dcp", "--ranks", "2", "--ranks is for --to deepspeed, not for dcp"),
        ("deepspeed-universal", "--ranks", "2", "--ranks is for --to deepspeed, not for deepspeed"),
        ("keepstep", "--zero-stage", "2", f"--zero-stage {OF_DEEPSPEED} keepstep"),
        ("torch", "--buffers", __file__, f"--buffers {OF_DEEPSPEED} torch"),
        ("keepstep", "--config", __file__, "--config is for rules; give --rules as well"),
        ("dcp", "--workers", "2", "--workers above 1 is for --to keepstep, not for dcp"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_options_without_effect_are_refused_before_the_source_is_opened(
    tmp_path: Path, to: str, option: str, value: str, message: str, more: tuple[str, ...]
) -> None:
    arguments = ["convert", str(tmp_path / "absent"), str(tmp_path / "b"), "--to", to]
    done = CliRunner().invoke(ckpt, [*arguments, option, value, *more])
    assert done.exit_code == 2, done.output
    assert message in done.output


def test_rules_check_takes_off_names_of_wrappers_as_convert_does(tmp_path: Path) -> None:
    source, rules = tmp_path / "ddp.pt", tmp_path / "rules.toml"
    torch.save({f"module.l{n}.weight": torch.ones(3) for n in range(2)}, source)
    rules.write_text('[[rule]]\nmatch = "l{n:int}.weight"\nrename = "x{n}.weight"')
    given = ["--rules", str(rules)]
    converted = CliRunner().invoke(ckpt, ["convert", str(source), str(tmp_path / "b"), *given])
    assert converted.exit_code == 0, converted.output
    checked = CliRunner().invoke(ckpt, ["rules", "check", str(source), *given])
    assert checked.exit_code == 0, checked.output
    assert "l{n:int}.weight: 2 tensors" in checked.output
