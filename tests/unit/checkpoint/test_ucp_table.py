"""The layouts that Universal Checkpointing was shown with, from any source to any target.

Lian et al. (arXiv 2406.18820, sections on one source to several targets, several sources to one,
and other architectures) train GPT, LLaMA, BLOOM and a mixture of experts in DeepSpeed with tensor,
pipeline, sequence and data parallelism and ZeRO, and go on in other layouts. Here the same layouts,
of tiny models, are read from files as DeepSpeed lays them out, without a conversion in between:
every rank of the target gets its boxes of parameters, masters and both moments, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.fragments import boxes_of_range
from keepstep.checkpoint.format.layout.source import BoxRequest
from keepstep.checkpoint.live.tensors import as_bytes
from tests.opened_checkpoints import open_foreign
from tests.unit.checkpoint.convert.read.deepspeed_layouts import (
    Layout,
    Model,
    Parameter,
    expected_of,
    state_of,
    write,
)

HIDDEN, FFN, HEAD, EXPERTS = 8, 12, 2, 2
VOCABULARY, PADDED = 13, 16
COPY = Parameter((HIDDEN,))


def column(rows: int, *parts: int) -> Parameter:
    return Parameter((rows, HIDDEN), 0, parts)


def row(columns: int) -> Parameter:
    return Parameter((HIDDEN, columns), 1)


def embedding(columns: int = HIDDEN) -> Parameter:
    return Parameter((PADDED, columns), 0, logical_rows=VOCABULARY)


def pipeline(
    block: dict[str, Parameter],
    ends: dict[int, dict[str, Parameter]],
    *,
    blocks: int = 2,
    is_tied: bool,
    info: dict[str, object],
) -> Model:
    """Return an embedding, blocks, a norm, and a head, which may be the embedding again."""
    layers = (ends[0], *([block] * blocks), ends[1], ends[0] if is_tied else ends[2])
    return Model(
        layers,
        {0: "embed", len(layers) - 1: "embed"} if is_tied else {},
        {
            "universal_checkpoint_version": 0.2,
            "original_vocab_size": VOCABULARY,
            "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed"],
            "vocabulary_parameter_patterns": [r".*words$"],
            **info,
        },
        {"1.mask": (3,)},
    )


def gpt() -> Model:
    """Tied embeddings, learned positions, projections fused by heads, biases."""
    return pipeline(
        {
            "norm": COPY,
            "qkv": column(3 * 8),
            "qkv_bias": Parameter((3 * 8,), 0),
            "dense": row(8),
            "dense_bias": COPY,
            "fc2": row(FFN),
        },
        {0: {"words": embedding(), "positions": Parameter((5, HIDDEN))}, 1: {"norm": COPY}},
        is_tied=True,
        info={
            "tp_replicated_parameter_patterns": [r"\d+\.norm", r"\d+\.dense_bias", ".*positions"],
            "parameter_with_row_parallelism_patterns": [r"\d+\.dense$", r"\d+\.fc2"],
        },
    )


def llama() -> Model:
    """Fewer heads of keys and values than of queries, gated layers, a head of its own."""
    sizes = (4 * HEAD, 4, 4)
    return pipeline(
        {
            "norm": COPY,
            "qkv": column(sum(sizes), *sizes),
            "dense": row(8),
            "fc1": column(2 * FFN, FFN, FFN),
            "fc2": row(FFN),
        },
        {0: {"words": embedding()}, 1: {"norm": COPY}, 2: {"head_words": embedding()}},
        is_tied=False,
        info={
            "tp_replicated_parameter_patterns": [r"\d+\.norm"],
            "parameter_with_row_parallelism_patterns": [r"\d+\.dense", r"\d+\.fc2"],
            "parameter_with_2_sub_params_cat_dim_0": [r"\d+\.fc1"],
            "parameter_with_sub_params": [
                {"patterns": [r"\d+\.qkv"], "shape": (sizes, -1), "partition_dim": 0}
            ],
        },
    )


def bloom() -> Model:
    """No positions, a norm behind the embedding, and norms that ranks have trained apart."""
    drifting = Parameter((HIDDEN,), is_averaged=True)
    return pipeline(
        {"norm": drifting, "qkv": column(3 * 8), "dense": row(8), "bias": COPY},
        {0: {"words": embedding(), "norm": drifting}, 1: {"norm": drifting}},
        blocks=4,
        is_tied=True,
        info={
            "parameter_to_average_patterns": [r".*\.norm$"],
            "tp_replicated_parameter_patterns": [r"\d+\.bias"],
            "parameter_with_row_parallelism_patterns": [r"\d+\.dense"],
        },
    )


def moe() -> Model:
    """Experts stacked in one tensor, each with its gate beside the rest; a router."""
    return pipeline(
        {
            "norm": COPY,
            "qkv": column(3 * 8),
            "router": Parameter((EXPERTS, HIDDEN)),
            "w1": Parameter((EXPERTS, 2 * FFN, HIDDEN), 1, (FFN, FFN)),
            "w2": Parameter((EXPERTS, HIDDEN, FFN), 2),
        },
        {0: {"words": embedding()}, 1: {"norm": COPY}, 2: {"head_words": embedding()}},
        is_tied=False,
        info={
            "tp_replicated_parameter_patterns": [r"\d+\.norm", r"\d+\.router"],
            "parameter_with_sub_params": [
                {"patterns": [r"\d+\.w1"], "shape": (EXPERTS, (FFN, FFN), -1), "partition_dim": 1},
                {"patterns": [r"\d+\.w2"], "shape": (EXPERTS, HIDDEN, (FFN,)), "partition_dim": 2},
            ],
        },
    )


@dataclass(frozen=True)
class Target:
    """Ranks that a model is cut over: by tensor parallelism, layers, and rows of what is left.

    Or, as ZeRO does, by ranges of flattened tensors.
    """

    tp: int
    pp: int
    dp: int
    is_flat: bool = False

    def __str__(self) -> str:
        return f"tp{self.tp}-pp{self.pp}-dp{self.dp}" + ("-flat" if self.is_flat else "")

    def boxes(self, parameter: Parameter, shape: tuple[int, ...]) -> Iterator[Box]:
        """Yield the boxes of all ranks that a parameter, or a slot of its shape, is cut into."""
        if shape != parameter.shape:
            yield Box.whole(shape)
            return
        for rank, own in itertools.product(range(self.tp), range(self.dp)):
            for box in self._of_rank(parameter, rank):
                rows = box.shape[0]
                most = -(-rows // self.dp)
                if self.is_flat:
                    count = -(-box.size // self.dp)
                    begin, end = min(own * count, box.size), min((own + 1) * count, box.size)
                    for inside in boxes_of_range(box.shape, begin, end):
                        yield shifted(inside, box)
                elif own * most < rows:
                    count = min(most, rows - own * most)
                    yield Box(
                        (box.offset[0] + own * most, *box.offset[1:]), (count, *box.shape[1:])
                    )

    def _of_rank(self, parameter: Parameter, rank: int) -> Iterator[Box]:
        if parameter.dim is None:
            yield Box.whole(parameter.shape)
            return
        start = 0
        for size in parameter.parts or (parameter.shape[parameter.dim],):
            offset, extents = [0] * len(parameter.shape), list(parameter.shape)
            extents[parameter.dim] = size // self.tp
            offset[parameter.dim] = start + rank * (size // self.tp)
            start += size
            yield Box(tuple(offset), tuple(extents))


def shifted(box: Box, outer: Box) -> Box:
    return Box(tuple(a + b for a, b in zip(box.offset, outer.offset, strict=True)), box.shape)


ONE_TO_MANY = (
    Target(2, 2, 2), Target(2, 2, 1), Target(2, 1, 2), Target(1, 2, 2), Target(2, 1, 1),
    Target(1, 2, 1), Target(1, 1, 4), Target(1, 1, 1), Target(1, 1, 3, is_flat=True),
)  # fmt: skip
FAMILIES: dict[str, Callable[[], Model]] = {"gpt": gpt, "llama": llama, "bloom": bloom, "moe": moe}
# Rows of the paper: one source to several targets, several to one, other architectures. Where it
# had TP 2, PP 24, DP 8 for BLOOM, here are fewer stages.
SOURCES: tuple[tuple[str, Layout, tuple[Target, ...]], ...] = (
    ("gpt", Layout(tp=2, pp=2, dp=2), ONE_TO_MANY),
    *(
        ("gpt", layout, (Target(2, 2, 1), Target(2, 2, 2, is_flat=True)))
        for layout in (
            Layout(tp=1, pp=1, dp=4),
            Layout(tp=2, pp=1, dp=2),
            Layout(tp=1, pp=2, dp=2),
            Layout(tp=2, pp=2, dp=1),
            Layout(tp=1, pp=1, dp=1),
            Layout(tp=4, pp=1, dp=1),
            Layout(tp=1, pp=1, dp=4, stage=2),
            Layout(tp=2, pp=1, dp=2, stage=2),
            Layout(tp=1, pp=1, dp=4, stage=3),
            Layout(tp=1, pp=1, dp=2, sp=2),
            Layout(tp=1, pp=1, dp=2, sp=2, stage=2),
            Layout(tp=1, pp=1, dp=2, sp=2, stage=3),
            Layout(tp=2, pp=1, dp=1, sp=2, stage=1),
            Layout(tp=2, pp=1, dp=2, stage=3, dtype=torch.float32),
            Layout(tp=2, pp=1, dp=1, stage=0, dtype=torch.float32),
        )
    ),
    ("llama", Layout(tp=2, pp=2, dp=2), (Target(2, 1, 2), Target(2, 2, 1), Target(1, 1, 2))),
    ("llama", Layout(tp=2, pp=1, dp=2, stage=2), (Target(1, 2, 2), Target(4, 1, 1))),
    ("llama", Layout(tp=1, pp=1, dp=4, stage=3), (Target(2, 2, 1), Target(4, 1, 1))),
    ("bloom", Layout(tp=2, pp=6, dp=2), (Target(2, 6, 1), Target(2, 3, 2), Target(1, 1, 4))),
    ("moe", Layout(tp=1, pp=2, dp=4), (Target(2, 2, 2), Target(1, 1, 2))),
    ("moe", Layout(tp=2, pp=2, dp=1), (Target(1, 2, 4), Target(4, 1, 1))),
)


def named(family: str, layout: Layout) -> str:
    sequence = f"-sp{layout.sp}" if layout.sp > 1 else ""
    return f"{family}-tp{layout.tp}-pp{layout.pp}-dp{layout.dp}{sequence}-zero{layout.stage}"


@pytest.mark.parametrize(
    ("family", "layout", "targets"), SOURCES, ids=[named(f, layout) for f, layout, _ in SOURCES]
)
def test_every_rank_of_the_target_gets_its_boxes_bit_for_bit(
    tmp_path: Path, family: str, layout: Layout, targets: tuple[Target, ...]
) -> None:
    model = FAMILIES[family]()
    state = state_of(model)
    source = open_foreign(str(write(tmp_path / "run", model, state, layout)))
    expected = expected_of(model, state, layout)
    assert {key: spec.shape for key, spec in source.tensors.items()} == {
        key: tuple(tensor.shape) for key, tensor in expected.items()
    }
    assert source.step == 3
    for target in targets:
        check_filled(source, model, expected, target)


def check_filled(
    source: ForeignCheckpoint, model: Model, expected: dict[str, torch.Tensor], target: Target
) -> None:
    """Read what each rank of a target has, stage by stage, and compare it."""
    parameters = model.parameters
    layers = np.array_split(range(len(model.layers)), target.pp)
    stages = [{name for layer in own for name in model.of_layer(int(layer))} for own in layers]
    read: set[str] = set()
    for stage in stages:
        requests, wanted = [], []
        for key, tensor in expected.items():
            name = key.split("/")[1]
            if name not in stage and (name in parameters or stage is not stages[0]):
                continue
            read.add(key)
            parameter = parameters.get(name, Parameter(tuple(tensor.shape)))
            for box in target.boxes(parameter, tuple(tensor.shape)):
                into = np.zeros(box.size * tensor.element_size(), np.uint8)
                requests.append(BoxRequest(key, box, into.data))
                wanted.append((key, box, into, as_bytes(tensor[box.slices].contiguous())))
        source.read(requests)
        for key, box, into, want in wanted:
            assert into.tobytes() == bytes(want), (key, box)
    assert read == set(expected)
