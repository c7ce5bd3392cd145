"""Tests of other spellings: what tied names become part of is there, and is what it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from keepstep.checkpoint.convert.rules.plan import Plan
from keepstep.checkpoint.convert.rules.planning import apply
from keepstep.checkpoint.convert.rules.rule_file import parse_rules
from keepstep.checkpoint.convert.write.renaming import RenamedSource, renamed_source
from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.source import BoxRequest, Source
from tests.opened_checkpoints import open_any, open_foreign

STACKED = """
[[rule]]
match = "stack.{leaf:w|b}"
rename = "layers.{layer:int}.{leaf}"
stacked = { axis = 0, placeholder = "layer" }

[[rule]]
match = "{rest...}"
"""


def stacked(path: Path, content: object) -> RenamedSource:
    """Save with PyTorch, and return what has the layers of it stacked."""
    torch.save(content, path)
    rules = parse_rules(STACKED, "rules.toml")["rule"].inverted
    return renamed_source(open_any(str(path)).source, lambda tensors: apply(rules, tensors, {}))


def values(source: RenamedSource, key: str) -> np.ndarray:
    spec = source.tensors[key]
    into = np.empty(spec.shape, spec.dtype)
    source.read([BoxRequest(key, Box.whole(spec.shape), into.reshape(-1).view(np.uint8).data)])
    return into


def test_layers_that_share_a_weight_are_stacked_with_it_in_each_place(tmp_path: Path) -> None:
    shared, own = torch.randn(2, 3), torch.randn(2, 3)
    state = {"layers.0.w": shared, "layers.1.w": own, "layers.2.w": shared, "head": shared}
    whole = stacked(tmp_path / "a.pt", state)
    assert np.array_equal(values(whole, "model/stack.w"), torch.stack([shared, own, shared]))
    assert whole.left_out() == []


def test_the_state_of_a_shared_weight_is_stacked_as_it_is(tmp_path: Path) -> None:
    weights = [torch.nn.Parameter(torch.randn(3, 3)) for _ in range(2)]
    optimizer = torch.optim.AdamW([("layers.0.w", weights[0]), ("layers.1.w", weights[1])])
    for number, weight in enumerate(weights):
        weight.grad = torch.full_like(weight, number + 1.0)
    optimizer.step()
    model = {
        "layers.0.w": weights[0].data,
        "layers.1.w": weights[1].data,
        "layers.2.w": weights[0].data,
    }
    whole = stacked(tmp_path / "a.pt", {"model": model, "optimizer": optimizer.state_dict()})
    averages = [optimizer.state[weights[number]]["exp_avg"] for number in (0, 1, 0)]
    assert np.array_equal(values(whole, "optim/stack.w/exp_avg"), torch.stack(averages))
    assert [group["parameters"] for group in whole.documents["optim/groups"]] == [["stack.w"]]


def test_a_tied_name_that_is_nothing_else_stays_tied(tmp_path: Path) -> None:
    shared = torch.randn(2, 3)
    whole = stacked(tmp_path / "a.pt", {"embedding": shared, "head": shared})
    assert len(whole.tensors) == 1
    (first,) = whole.tensors
    assert whole.documents["model/tied"] == {
        name: first.removeprefix("model/")
        for name in ("embedding", "head")
        if f"model/{name}" != first
    }


def test_a_tied_name_is_written_where_rules_drop_the_name_that_stores_it(tmp_path: Path) -> None:
    shared = torch.randn(2, 3)
    torch.save({"embedding": shared, "head": shared}, tmp_path / "a.pt")
    source = open_any(str(tmp_path / "a.pt")).source
    (alias,) = source.documents["model/tied"]
    (first,) = source.documents["model/tied"].values()
    text = f'[[rule]]\nmatch = "{first}"\ndrop = "unused"\n[[rule]]\nmatch = "{alias}"\n'
    rules = parse_rules(text, "rules.toml")["rule"]
    whole = renamed_source(source, lambda tensors: apply(rules, tensors, {}))
    assert list(whole.tensors) == [f"model/{alias}"]
    assert np.array_equal(values(whole, f"model/{alias}"), shared)
    assert whole.documents["model/tied"] == {}


def test_options_and_numbers_of_dropped_parameters_are_named(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "a.pt")
    source = open_foreign(str(tmp_path / "a.pt"))
    documents = {
        **source.documents,
        "optim/groups": [{"parameters": ["a", "b"], "options": {}}],
        "optim/scalars": {"a/step": 3, "b/step": 3},
    }
    rules = parse_rules('[[rule]]\nmatch = "a"\n[[rule]]\nmatch = "b"\ndrop = "no"', "r")["rule"]
    whole = renamed_source(
        replace(source, documents=documents), lambda tensors: apply(rules, tensors, {})
    )
    assert [left.name for left in whole.left_out()] == [
        "model/b", "optim/groups: b", "optim/scalars: b/step"
    ]  # fmt: skip


def test_no_read_takes_more_of_the_source_than_was_asked_for(tmp_path: Path) -> None:
    """Rotary rows lie far apart, and a box around some of them has most of the tensor."""
    weights = torch.arange(2**21, dtype=torch.float32).reshape(2048, 1024)
    torch.save({"w": weights}, tmp_path / "a.pt")
    source = open_foreign(str(tmp_path / "a.pt"))
    text = '[[rule]]\nmatch = "w"\nreorder = { dim = 0, shape = [2, 1024], order = [1, 0] }\n'
    rules = parse_rules(text, "rules.toml")["rule"]
    whole = renamed_source(source, lambda tensors: apply(rules, tensors, {}))
    read: list[int] = []

    class Counted:
        tensors, documents = source.tensors, source.documents

        def read(self, requests: Sequence[BoxRequest]) -> None:
            read.append(sum(request.into.nbytes for request in requests))
            source.read(requests)

    counted = replace(whole, whole=cast(Source, Counted()))
    into = np.empty((512, 1024), np.float32)
    counted.read(
        [BoxRequest("model/w", Box((512, 0), into.shape), into.reshape(-1).view("u1").data)]
    )
    expected = weights.reshape(2, 1024, 1024).transpose(0, 1).reshape(2048, 1024)
    assert np.array_equal(into, expected[512:1024])
    assert max(read) <= into.nbytes
    assert sum(read) == into.nbytes


def test_tensors_that_become_one_are_compared_to_the_last_byte(tmp_path: Path) -> None:
    weights = torch.ones(2**21)
    torch.save({"a": weights, "b": weights.clone()}, tmp_path / "a.pt")
    source = open_foreign(str(tmp_path / "a.pt"))
    plan = Plan(tensors={}, equal=(("model/a", "model/b"),))
    RenamedSource(whole=source, plan=plan, documents={}).check_equal()
    weights[-1] = 2
    torch.save({"a": weights, "b": torch.ones(2**21)}, tmp_path / "a.pt")
    source = open_foreign(str(tmp_path / "a.pt"))
    with pytest.raises(CheckpointDamaged, match="model/b and model/a differ"):
        RenamedSource(whole=source, plan=plan, documents={}).check_equal()
