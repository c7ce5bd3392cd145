"""From keepstep's format to another and back: whatever the other can hold is bit-identical."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from keepstep.checkpoint.convert.write.conversion import Converted, Target, convert
from keepstep.checkpoint.convert.write.opened import Checkpoint
from keepstep.checkpoint.convert.write.selection import Selection
from keepstep.checkpoint.convert.write.zero_layout import ZeroLayout
from keepstep.checkpoint.format.layout.source import Source
from tests.opened_checkpoints import open_any
from tests.unit.checkpoint.convert.write.sources import bytes_of, checkpoint_of

SOURCES = {
    "untied": checkpoint_of(is_tied=False),
    "tied-bfloat16": checkpoint_of(is_tied=True, dtype="bfloat16"),
}
TARGETS = {
    "dcp": (Target.DCP, None),
    "torchtitan": (Target.TORCHTITAN, None),
    "torch": (Target.TORCH_SAVE, None),
    "safetensors": (Target.SAFETENSORS, None),
    "huggingface": (Target.HUGGING_FACE, None),
    "deepspeed-universal": (Target.DEEPSPEED_UNIVERSAL, None),
    "deepspeed-universal-3": (Target.DEEPSPEED_UNIVERSAL, ZeroLayout(3)),
    "zero1-3": (Target.DEEPSPEED, ZeroLayout(1, 3)),
    "zero2-16": (Target.DEEPSPEED, ZeroLayout(2, 16)),
    "zero3-4": (Target.DEEPSPEED, ZeroLayout(3, 4)),
}
# What a format has under a name of its own, so that it is there when it comes back.
GAINED = {
    "torch": {"step"},
    "torchtitan": {"train_state/step"},
    "deepspeed": {"skipped_steps", "global_steps"},
    "deepspeed-universal": {"skipped_steps", "global_steps"},
}
MODELS = (Target.SAFETENSORS, Target.HUGGING_FACE)
ENDINGS = {Target.TORCH_SAVE: ".pt", Target.SAFETENSORS: ".safetensors"}


def converted(
    opened: Checkpoint, url: Path, to: Target, zero: ZeroLayout | None = None
) -> Converted:
    chosen = Selection(whole=opened.source, only_model=to in MODELS)
    return convert(opened, "here", str(url), to, chosen, memory_nbytes=2**28, zero=zero)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the sources in keepstep's format."""
    root = tmp_path_factory.mktemp("stored")
    for case, source in SOURCES.items():
        converted(Checkpoint(source, "memory"), root / case, Target.UNIVERSAL)
    return {case: root / case for case in SOURCES}


@pytest.mark.parametrize(("case", "name"), [*itertools.product(SOURCES, TARGETS)])
def test_what_a_format_holds_comes_back_bit_for_bit(
    tmp_path: Path, stored: dict[str, Path], case: str, name: str
) -> None:
    target, zero = TARGETS[name]
    there = tmp_path / f"there{ENDINGS.get(target, '')}"
    lost = converted(open_any(str(stored[case])), there, target, zero).left_out
    back = converted(open_any(str(there)), tmp_path / "second", Target.UNIVERSAL)
    assert back.left_out == ()
    before = open_any(str(stored[case])).source
    after = open_any(str(tmp_path / "second")).source
    if target in MODELS:
        assert_same_tensors(before, after, [key for key in before.tensors if "model/" in key])
        return
    assert lost == ()
    assert after.step == before.step == 3
    assert_same_tensors(before, after, list(before.tensors))
    for document in ("optim/groups", "model/tied", "optim/scalars", "masters"):
        assert after.documents.get(document) == before.documents.get(document), document
    gained = after.documents["values"].items() - before.documents["values"].items()
    assert before.documents["values"].items() <= after.documents["values"].items()
    assert {name for name, _ in gained} == GAINED.get(target, set())


@pytest.mark.parametrize(
    "target", [Target.UNIVERSAL, Target.DCP, Target.TORCHTITAN, Target.TORCH_SAVE]
)
def test_masters_of_a_model_that_is_as_wide_now_are_slots(tmp_path: Path, target: Target) -> None:
    whole = checkpoint_of(is_tied=False, dtype="bfloat16")
    names = sorted(whole.documents["masters"])
    chosen = Selection(whole=whole, model_dtype="float32")
    there = tmp_path / f"there{ENDINGS.get(target, '')}"
    opened = Checkpoint(whole, "memory")
    done = convert(opened, "here", str(there), target, chosen, memory_nbytes=2**28)
    assert [line.partition(":")[0] for line in done.left_out] == [f"masters/{n}" for n in names]
    assert done.left_out[0].endswith("float32 now, which is as wide as its master_param; that "
                                     "remains a slot of the optimizer")  # fmt: skip
    after = open_any(str(there)).source
    assert "masters" not in after.documents
    assert_same_tensors(chosen, after, list(chosen.tensors))
    assert {"optim/odd.weight/master_param", "model/odd.weight"} <= after.tensors.keys()
    assert after.tensors["model/odd.weight"].dtype == "float32"


def assert_same_tensors(before: Source, after: Source, keys: list[str]) -> None:
    expected = {_without_root(key): key for key in keys}
    found = {_without_root(key): key for key in after.tensors}
    assert found.keys() == expected.keys()
    for name, key in expected.items():
        assert after.tensors[found[name]] == before.tensors[key], key
        assert bytes_of(after, found[name]) == bytes_of(before, key), key


def _without_root(key: str) -> str:
    # torchtitan has the model at the root, so another tensor is put into a mapping.
    return key.removeprefix("others/")
