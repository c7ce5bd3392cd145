"""Claims about documents on tensors: they are read as written, contradictions are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.described import (
    Master,
    Tie,
    check_described,
    logical_shape_of,
    master_of,
    tie_of,
)
from keepstep.checkpoint.format.layout.descriptions import (
    Average,
    Descriptions,
    Scale,
    describing_documents,
)
from keepstep.checkpoint.format.layout.documents import merged_documents
from keepstep.checkpoint.format.layout.part_table import Part, PartTable
from keepstep.checkpoint.format.layout.source import TensorSpec

BF16, F32, U8, I64 = "bfloat16", "float32", "uint8", "int64"
TENSORS = {
    "model/embed.weight": TensorSpec(BF16, (256, 64)),
    "model/q.weight": TensorSpec("float8_e4m3fn", (256, 130)),
    "model/q.scale": TensorSpec(F32, (2, 2)),
    "model/row.weight": TensorSpec("int8", (8, 6)),
    "model/row.scale": TensorSpec(F32, (8,)),
    "model/row.zero": TensorSpec("int8", (8, 1)),
    "optim/embed.weight/step": TensorSpec(F32, ()),
    "optim/embed.weight/exp_avg": TensorSpec(F32, (256, 64)),
    "optim/embed.weight/master_param": TensorSpec(F32, (256, 64)),
    "model/wide": TensorSpec(F32, (3,)),
    "optim/wide/copy": TensorSpec(F32, (3,)),
    "extra/ema/embed.weight": TensorSpec(F32, (256, 64)),
    "extra/ema/count": TensorSpec(I64, (1,)),
}
ALL = Descriptions(
    parts={"embed.*": PartTable(0, (Part("a", 128), Part("b", 128)))},
    padding={"embed.weight": (250, 64)},
    scales={
        "q.weight": Scale("q.scale", (128, 128), BF16),
        "model/row.weight": Scale("model/row.scale", (1, 6), F32, zero_point="row.zero"),
        "another_stage.weight": Scale("another_stage.scale", (1,), F32),
    },
    averages={
        "extra/ema/embed.weight": Average("embed.weight", decay=0.999, count="extra/ema/count")
    },
)
DOCUMENTS = {
    "parts": {
        "model/embed.weight": {
            "axis": 0,
            "groups": 1,
            "parts": [
                {"name": "a", "extent": 128, "most_slices": None},
                {"name": "b", "extent": 128, "most_slices": None},
            ],
        }
    },
    "padding": {"model/embed.weight": {"logical_shape": [250, 64]}},
    "masters": {"model/embed.weight": {"slot": "master_param", "dtype": F32}},
    "averages": {
        "extra/ema/embed.weight": {
            "of": "model/embed.weight", "decay": 0.999, "count": "extra/ema/count",
        }
    },
    "scales": {
        "model/q.weight": {"scale": "model/q.scale", "block_shape": [128, 128], "dtype": BF16},
        "model/row.weight": {
            "scale": "model/row.scale", "block_shape": [1, 6], "dtype": F32,
            "zero_point": "model/row.zero",
        },
    },
}  # fmt: skip


def test_descriptions_become_the_documents_of_the_format() -> None:
    assert describing_documents(ALL, TENSORS) == DOCUMENTS
    check_described(DOCUMENTS, TENSORS)


def test_nothing_described_is_no_document() -> None:
    tensors = {key: spec for key, spec in TENSORS.items() if not key.endswith("master_param")}
    assert describing_documents(Descriptions(), tensors) == {}


@pytest.mark.parametrize("name", ["embed.weight", "model/embed.weight"])
def test_a_parameter_is_found_by_its_key_and_by_its_name(name: str) -> None:
    tensors = {"model/embed.weight": TensorSpec(F32, (4,))}
    documents = describing_documents(Descriptions(padding={name: (3,)}), tensors)
    assert documents == {"padding": {"model/embed.weight": {"logical_shape": [3]}}}
    by_name = {name: {"logical_shape": [3]}}
    assert logical_shape_of(by_name, "model/embed.weight") == (3,)
    check_described({"padding": by_name}, tensors)


def test_ties_and_masters_name_tensors_by_their_keys() -> None:
    ties = {"a": "b", "c": {"name": "b", "transposed": True, "later": 1}}
    assert tie_of(ties, "model/a") == Tie("model/b", is_transposed=False)
    assert tie_of(ties, "model/c") == Tie("model/b", is_transposed=True)
    assert tie_of(ties, "model/b") is tie_of(None, "model/b") is None
    masters = {"model/w": {"slot": "fp32", "dtype": F32}}
    assert master_of(masters, "model/w") == Master("optim/w/fp32", F32)


@pytest.mark.parametrize(
    "narrow", [TensorSpec(F32, (256, 64)), TensorSpec("int32", (256, 64)), TensorSpec(BF16, (1,))]
)
def test_a_slot_that_holds_no_wider_values_is_no_master(narrow: TensorSpec) -> None:
    tensors = {**TENSORS, "model/embed.weight": narrow}
    assert "masters" not in describing_documents(Descriptions(), tensors)


def test_stages_describe_their_own_tensors() -> None:
    def stage(name: str, world_size: int) -> dict[str, Json]:
        entries = {name: name}
        return {
            **dict.fromkeys(("parts", "padding", "masters", "averages", "scales"), entries),
            "model/tied": entries,
            "provenance": {"world_size": world_size},
            "config": {"layers": 2},
        }

    merged = merged_documents([stage("a", 1), stage("b", 2)])
    both = {"a": "a", "b": "b"}
    for name in ("parts", "padding", "masters", "averages", "scales", "model/tied"):
        assert merged[name] == both
    assert merged["provenance"] == {"world_size": 1}
    assert merged["config"] == {"layers": 2}


EMBED, SCALED, EMA = "model/embed.weight", "model/q.weight", "extra/ema/embed.weight"
AVERAGE = DOCUMENTS["averages"][EMA]
SCALE = DOCUMENTS["scales"][SCALED]
HOSTILE: Mapping[str, dict[str, Any]] = {
    "no object": {"padding": [1]},
    "an entry that is no object": {"padding": {EMBED: 7}},
    "an entry without members": {"padding": {EMBED: {}}},
    "an unknown tensor": {"padding": {"model/other": {"logical_shape": [1]}}},
    "a larger logical shape": {"padding": {EMBED: {"logical_shape": [257, 64]}}},
    "other dimensions": {"padding": {EMBED: {"logical_shape": [256]}}},
    "a negative size": {"padding": {EMBED: {"logical_shape": [-1, 64]}}},
    "a size that is no number": {"padding": {EMBED: {"logical_shape": ["1", 64]}}},
    "a size that is true": {"padding": {EMBED: {"logical_shape": [True, 64]}}},
    "parts of another extent": {
        "parts": {EMBED: PartTable(0, (Part("a", 128),)).to_json()}
    },
    "parts of a dimension that is not there": {
        "parts": {EMBED: PartTable(7, (Part("a", 128),)).to_json()}
    },
    "parts without extents": {"parts": {EMBED: {"axis": 0, "groups": 1, "parts": [{}]}}},
    "a master that is no slot": {"masters": {EMBED: {"slot": "other", "dtype": F32}}},
    "a master of another shape": {"masters": {EMBED: {"slot": "step", "dtype": F32}}},
    "a master of another type": {"masters": {EMBED: {"slot": "master_param", "dtype": "float64"}}},
    "a master that is no wider": {"masters": {"model/wide": {"slot": "copy", "dtype": F32}}},
    "a master of no name": {"masters": {EMBED: {"slot": 3, "dtype": F32}}},
    "a master of a slot": {
        "masters": {"optim/embed.weight/exp_avg": {"slot": "master_param", "dtype": F32}}
    },
    "an average of nothing": {"averages": {EMA: {**AVERAGE, "of": "model/other"}}},
    "an average of another shape": {"averages": {EMA: {**AVERAGE, "of": SCALED}}},
    "an average of itself": {"averages": {EMA: {**AVERAGE, "of": EMA}}},
    "averages in a circle": {"averages": {EMA: AVERAGE, EMBED: {"of": EMA}}},
    "averages in a circle by a name": {"averages": {EMA: AVERAGE, "embed.weight": {"of": EMA}}},
    "a decay above 1": {"averages": {EMA: {**AVERAGE, "decay": 1.5}}},
    "a decay that is NaN": {"averages": {EMA: {**AVERAGE, "decay": float("nan")}}},
    "a count of many": {"averages": {EMA: {**AVERAGE, "count": SCALED}}},
    "a scale that is not there": {"scales": {SCALED: {**SCALE, "scale": "model/other"}}},
    "a scale for other blocks": {"scales": {SCALED: {**SCALE, "block_shape": [64, 128]}}},
    "blocks of nothing": {"scales": {SCALED: {**SCALE, "block_shape": [0, 128]}}},
    "blocks of other dimensions": {"scales": {SCALED: {**SCALE, "block_shape": [128]}}},
    "zero points for other blocks": {"scales": {SCALED: {**SCALE, "zero_point": "model/row.zero"}}},
    "a scale of no type": {"scales": {SCALED: {**SCALE, "dtype": "float3"}}},
    "a scale of an odd type": {"scales": {SCALED: {**SCALE, "dtype": ["float32"]}}},
    "scales in a circle": {
        "scales": {
            "model/q.scale": {"scale": "model/q.scale", "block_shape": [1, 1], "dtype": F32}
        }
    },
    "parts of nothing": {"parts": {"head.weight": DOCUMENTS["parts"][EMBED]}},
    "a tie to nothing": {"model/tied": {"head.weight": "other.weight"}},
    "ties in a circle": {"model/tied": {"a": "b", "b": "a"}},
    "a tie that is a number": {"model/tied": {"head.weight": 3}},
    "a tie without a name": {"model/tied": {"head.weight": {"transposed": True}}},
    "a tie transposed by a number": {
        "model/tied": {"head.weight": {"name": "embed.weight", "transposed": 1}}
    },
    "the transpose of a vector": {
        "model/tied": {"head": {"name": "row.scale", "transposed": True}}
    },
    "a provenance that is a text": {"provenance": "here"},
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_what_contradicts_the_tensors_is_refused_by_name(what: str) -> None:
    (name,) = HOSTILE[what]
    with pytest.raises(ValueError, match=rf"^{name}"):
        check_described(HOSTILE[what], TENSORS)


class Looked(dict[str, TensorSpec]):
    """Tensors that note which of them were looked up."""

    def __init__(self, tensors: Mapping[str, TensorSpec]) -> None:
        super().__init__(tensors)
        self.keys_looked_up: set[str] = set()

    def __getitem__(self, key: str) -> TensorSpec:
        self.keys_looked_up.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_looked_up.add(key)
        return super().get(key, default)


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_ranks_share_the_check(world_size: int) -> None:
    for contradiction in HOSTILE.values():
        failed = 0
        for rank in range(world_size):
            try:
                check_described(contradiction, TENSORS, rank=rank, world_size=world_size)
            except ValueError:
                failed += 1
        assert failed >= 1, contradiction
    tensors = {f"model/{n:02}": TensorSpec(F32, (4,)) for n in range(40)}
    documents = {"padding": {key: {"logical_shape": [3]} for key in tensors}}
    shares = []
    for rank in range(world_size):
        looked = Looked(tensors)
        check_described(documents, looked, rank=rank, world_size=world_size)
        shares.append(sorted(looked.keys_looked_up))
    # Each looks at tensors that follow each other, so that few ranks parse one twice.
    assert [key for share in shares for key in share] == sorted(tensors)


@pytest.mark.parametrize("missing", ["model/q.scale", "model/row.zero", EMBED, "extra/ema/count"])
def test_what_names_tensors_of_other_ranks_is_left_to_them(missing: str) -> None:
    own = {key: spec for key, spec in TENSORS.items() if key != missing}
    documents = describing_documents(ALL, own, is_whole=False)
    assert documents
    for name, content in documents.items():
        expected = {
            key: entry
            for key, entry in DOCUMENTS[name].items()
            if key != missing and missing not in entry.values()
        }
        assert content == expected


def test_other_members_and_other_documents_are_left_to_later_releases() -> None:
    check_described(
        {
            "padding": {EMBED: {"logical_shape": [250, 64], "fill": "mean"}},
            "scales": {SCALED: {**SCALE, "rounding": "stochastic"}},
            "provenance": {"keepstep": 7},
            "config": ["anything"],
            "quantum": 3,
        },
        TENSORS,
    )


@pytest.mark.parametrize(
    "descriptions",
    [
        Descriptions(scales={"q.weight": Scale("q.other", (128, 128), BF16)}),
        Descriptions(averages={"extra/ema/embed.weight": Average("q.weight")}),
    ],
)
def test_a_description_that_contradicts_the_state_is_refused_before_it_is_stored(
    descriptions: Descriptions,
) -> None:
    with pytest.raises(LayoutMismatch, match="correct the descriptions"):
        describing_documents(descriptions, TENSORS)
