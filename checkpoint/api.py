"""Saving and loading without agents or snapshot servers; collective if there is a process group.

Ranks exchange what they hold (names and boxes, as JSON) once per save; tensor bytes go from each rank
straight to storage, or by way of one other rank where shards form no regular grid.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from keepstep.checkpoint.collective import all_gather_json, box_of, gather_chunks, rank
from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointError, LayoutMismatch
from keepstep.checkpoint.layout.boxes import Entry, Json, ShardIndex
from keepstep.checkpoint.layout.documents import merged_documents
from keepstep.checkpoint.live.capture import LiveStateReader
from keepstep.checkpoint.live.optimizer_options import is_json, restore_options
from keepstep.checkpoint.live.restore import allocate, restore
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor, describe
from keepstep.checkpoint.stored.chunking import plan_chunks
from keepstep.checkpoint.stored.format import StoredObject, StoredStep
from keepstep.checkpoint.stored.reader import StoredCheckpoint, list_steps
from keepstep.checkpoint.stored.storage import open_storage
from keepstep.checkpoint.stored.writer import publish, write_part

log = logging.getLogger("keepstep")

_VALUES = "values"

StateMapping = Mapping[str, object]

_Result = TypeVar("_Result")


def save(url: str, state: StateMapping, *, step: int, generation: int = 0) -> None:
    """Store a checkpoint of `step` under `url`; it is complete and durable when this returns.

    Args:
        url: a path, `file://`, `s3://bucket/prefix` or `gs://bucket/prefix`.
        state: a module, optimizers of its parameters, tensors (sharded or not), JSON values and mappings of
            these, by name. The module's tensors are stored as `model/<name>` and its optimizers' as
            `optim/<name>/<slot>`.
        step: number of completed steps.
        generation: distinguishes attempts at one step; the greatest is the one that loads.

    Raises:
        CheckpointExists: this step and generation is already there.
        CheckpointError: a rank could not write; every rank raises.
    """
    live, gathered = _on_all_ranks_gathering(
        lambda: _capture(state), lambda live: _indexed(live).to_json()
    )
    indexes = [ShardIndex.from_json(one) for one in gathered]
    plan = plan_chunks(indexes)
    storage, stored = open_storage(url), StoredStep(step, generation)
    tensors = {tensor.key: tensor for tensor in live.tensors}
    collected = gather_chunks(plan, indexes, tensors)
    _, gathered = _on_all_ranks_gathering(
        lambda: write_part(
            storage,
            stored,
            plan,
            [rank()],
            lambda key, box: (
                collected[key, box] if (key, box) in collected else box_of(tensors[key], box)
            ),
            name=rank(),
        ),
        StoredObject.to_json,
    )
    parts = [StoredObject.from_json(one) for one in gathered]
    documents = merged_documents(index.documents for index in indexes)
    _on_all_ranks(
        lambda: publish(storage, stored, parts, plan.tensors, documents) if rank() == 0 else None
    )


def load(
    url: str,
    state: StateMapping,
    *,
    step: int | None = None,
    strict: bool = True,
    convert: bool = False,
    fallback: bool = False,
    resize: Collection[str] = (),
) -> int:
    """Fill `state` from a checkpoint under `url`, whatever layout it was saved in; return its step.

    Args:
        url: as for `save`.
        state: as for `save`; modules, optimizers and tensors are filled in place. Mutable mappings get their
            JSON values. A module alone is loaded alone, for inference.
        step: which one; None: the newest.
        strict: refuse if names do not agree; else fill what both have.
        convert: convert tensors that were saved in another data type.
        fallback: if it is damaged, take the newest one that is intact; what is wrong is logged.
        resize: names of parameters that may be larger or smaller than they were, such as embeddings whose vocabulary was
            padded: what both have is filled, the rest is zero. Their optimizer state likewise.

    Raises:
        CheckpointMissing: there is none.
        LayoutMismatch: it does not fit; the message lists what.
        CheckpointDamaged: stored bytes were changed or lost.
    """
    # Rank 0 looks, so that all load the same one whatever appears meanwhile.
    found = _on_all_ranks(lambda: list_steps(url) if rank() == 0 else ())
    listed = all_gather_json([[s.step, s.generation] for s in found if step in (None, s.step)])[0]
    for position, chosen in enumerate(listed or [[step, None]]):
        try:
            return _load(
                url, state, *chosen, strict=strict, convert=convert, resize=frozenset(resize)
            )
        except CheckpointDamaged as error:
            if not fallback or position == len(listed) - 1:
                raise
            log.warning("%s: going back behind it", error)
    raise AssertionError("unreachable: the last one loads or raises")


def _load(
    url: str,
    state: StateMapping,
    step: int | None,
    generation: int | None,
    *,
    strict: bool,
    convert: bool,
    resize: Collection[str],
) -> int:
    with ExitStack() as made:

        def prepare() -> tuple[StoredCheckpoint, LiveState]:
            source = StoredCheckpoint.open(url, step, generation)
            for model, optimizers in _modules(state):
                made.callback(allocate(model, optimizers, source.tensors, resize=resize))
            return source, _capture(state)

        source, live = _on_all_ranks(prepare)
        filled = _fill(source, live, state, strict=strict, convert=convert, resize=resize)
        # It is the state's own from now on.
        made.pop_all()
        return filled


def _fill(
    source: StoredCheckpoint,
    live: LiveState,
    state: StateMapping,
    *,
    strict: bool,
    convert: bool,
    resize: Collection[str],
) -> int:
    keys_of_other_ranks: set[str] = set()
    mine = {tensor.key for tensor in live.tensors}
    # Only where a rank lacks something, as a pipeline stage does, must all say what they have.
    if any(
        all_gather_json(
            not mine.issuperset(key for key in source.tensors if key.startswith("model/"))
        )
    ):
        keys_of_other_ranks = {key for keys in all_gather_json(sorted(mine)) for key in keys}

    def fill() -> int:
        restore(
            live,
            source,
            strict=strict,
            convert=convert,
            keys_of_other_ranks=keys_of_other_ranks,
            resize=resize,
        )
        for model, optimizers in _modules(state):
            restore_options(model, optimizers, source.documents)
        _fill_values(state, source.documents.get(_VALUES, {}))
        return source.step

    return _on_all_ranks(fill)


def _on_all_ranks(act: Callable[[], _Result]) -> _Result:
    """Do something on every rank; if it fails on any, it fails on all, with the first one's reason and in the same way."""
    return _on_all_ranks_gathering(act, lambda _: None)[0]


def _on_all_ranks_gathering(
    act: Callable[[], _Result], share: Callable[[_Result], Json]
) -> tuple[_Result, list[Json]]:
    """Do something on every rank, as `_on_all_ranks`; also return what each rank shares of its result, in the order of ranks."""
    own: Exception | None = None
    result: _Result | None = None
    outcome: dict[str, Json] = {}
    try:
        result = act()
        outcome = {"shared": share(result)}
    except Exception as error:  # noqa: BLE001 - the others wait for this rank's word: they must hear of whatever it was
        own = error
        outcome = {"error": str(own), "damaged": isinstance(own, CheckpointDamaged)}
    outcomes = all_gather_json(outcome)
    failures = {number: one for number, one in enumerate(outcomes) if "error" in one}
    if not failures:
        return cast(_Result, result), [one["shared"] for one in outcomes]
    # Whether to fall back must be the same question everywhere: damage is damage only if nothing else is wrong.
    is_damage = all(one["damaged"] for one in failures.values())
    if own is not None and isinstance(own, CheckpointDamaged) == is_damage:
        raise own
    number, first = next((n, one) for n, one in failures.items() if one["damaged"] == is_damage)
    raise (CheckpointDamaged if is_damage else CheckpointError)(
        f"rank {number}: {first['error']}"
    ) from own


def _modules(state: StateMapping) -> list[tuple[nn.Module, list[Optimizer]]]:
    """Return the state's module with its optimizers."""
    modules = [value for value in state.values() if isinstance(value, nn.Module)]
    optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
    if len(modules) > 1:
        raise LayoutMismatch(
            "the state has several modules; put them into one nn.ModuleDict, or save under several URLs"
        )
    if optimizers and not modules:
        raise LayoutMismatch(
            "the state has an optimizer but not the module that names its parameters; add it"
        )
    return [(modules[0], optimizers)] if modules else []


def _capture(state: StateMapping) -> LiveState:
    tensors: list[LiveTensor] = []
    values: dict[str, Json] = {}
    documents: dict[str, Json] = {}
    for model, optimizers in _modules(state):
        captured = LiveStateReader(model, optimizers).capture()
        tensors += captured.tensors
        documents.update(captured.documents)
    _walk(state, "", tensors, values)
    keys = [tensor.key for tensor in tensors]
    if len(keys) != len(set(keys)):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise LayoutMismatch(f"{twice} is in the state twice; rename what is not the module's own")
    return LiveState(tuple(tensors), {**documents, _VALUES: values})


def _walk(
    state: StateMapping, prefix: str, tensors: list[LiveTensor], values: dict[str, Json]
) -> None:
    for name, value in state.items():
        key = f"{prefix}{name}"
        if isinstance(value, torch.Tensor):
            tensors.append(describe(key, value))
        elif isinstance(value, Mapping):
            _walk(value, f"{key}/", tensors, values)
        elif is_json(value):
            values[key] = value
        elif prefix or not isinstance(value, nn.Module | Optimizer):
            raise LayoutMismatch(
                f"{key}: a {type(value).__name__} cannot be stored; give tensors, JSON values and mappings "
                "of them, and the module and its optimizers at the top"
            )


def _fill_values(state: StateMapping, values: Mapping[str, Json], prefix: str = "") -> None:
    for name, value in list(state.items()):
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            _fill_values(value, values, f"{key}/")
        elif key in values and isinstance(state, dict):
            state[name] = values[key]


def _indexed(live: LiveState) -> ShardIndex:
    entries = tuple(
        Entry(
            key=tensor.key,
            dtype=tensor.dtype,
            global_shape=tensor.global_shape,
            box=tensor.box,
            byte_offset=0,
            nbytes=tensor.data.numel() * tensor.data.element_size(),
        )
        for tensor in live.tensors
    )
    return ShardIndex(0, entries, live.documents)
