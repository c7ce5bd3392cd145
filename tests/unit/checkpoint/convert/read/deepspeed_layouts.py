"""Checkpoints as DeepSpeed lays them out, written from whole tensors in any layout.

`test_deepspeed_parallel.py` compares them with what DeepSpeed itself wrote, file by file.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

Shape = tuple[int, ...]
State = Mapping[str, torch.Tensor]
"""Whole tensors by key: `master/<name>`, `optim/<name>/<slot>`; buffers as `buffer/<name>`."""

ALIGNMENT = 2
"""ZeRO pads a flat buffer to a multiple of this many elements for each rank."""


@dataclass(frozen=True)
class Parameter:
    """A parameter: its whole shape, and how tensor parallelism cuts it.

    Args:
        shape: the whole shape.
        dim: the dimension that is cut; None for copies.
        parts: sizes of the parts of that dimension, which are cut by themselves.
        logical_rows: the rows that are not padding.
        is_averaged: whether ranks' copies drift apart.
    """

    shape: Shape
    dim: int | None = None
    parts: tuple[int, ...] = ()
    logical_rows: int | None = None
    is_averaged: bool = False

    def slice(self, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """Return what a rank has."""
        if self.dim is None:
            drift = rank * 0.5 if self.is_averaged else 0.0
            return whole.clone() + drift
        sizes = self.parts or (self.shape[self.dim],)
        parts = [part.chunk(ranks, self.dim)[rank] for part in whole.split(sizes, self.dim)]
        return torch.cat(parts, self.dim).contiguous().clone()

    def of_ranks(self, whole: torch.Tensor, ranks: int) -> torch.Tensor:
        """Return what the ranks have together."""
        if not self.is_averaged:
            return whole
        total = torch.zeros_like(whole)
        for rank in range(ranks):
            total += self.slice(whole, rank, ranks)
        return total / ranks


@dataclass(frozen=True)
class Model:
    """A pipeline of layers: names of parameters in each, and keys of those that are tied."""

    layers: tuple[Mapping[str, Parameter], ...]
    tied: Mapping[int, str] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    buffers: Mapping[str, Shape] = field(default_factory=dict)

    def named(self, layers: range) -> dict[str, Parameter]:
        """Return the parameters of some layers in the order of the module: tied ones first."""
        named: dict[str, Parameter] = {}
        for is_tied in (True, False):
            for number in layers:
                if (number in self.tied) is is_tied:
                    named.update(self.of_layer(number))
        return named

    def of_layer(self, number: int) -> dict[str, Parameter]:
        """Return a layer's parameters by their names in the module."""
        key = self.tied.get(number)
        prefix = f"{number}." if key is None else f"tied_modules.{key}."
        return {f"{prefix}{name}": p for name, p in self.layers[number].items()}

    @property
    def parameters(self) -> dict[str, Parameter]:
        """All parameters."""
        return self.named(range(len(self.layers)))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism, stage of ZeRO, and data type of the module.

    Ranks of sequence parallelism hold what ranks of data parallelism do: ZeRO cuts over both.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: int = 1
    stage: int = 1
    dtype: torch.dtype = torch.bfloat16
    is_pipeline: bool | None = None

    @property
    def zero_ranks(self) -> int:
        """The ranks that ZeRO cuts over."""
        return self.dp * self.sp


def is_decayed(name: str) -> bool:
    """Return whether a parameter is in the second group, whose weights decay."""
    return not name.endswith(("norm", "bias"))


def state_of(model: Model, seed: int = 7) -> dict[str, torch.Tensor]:
    """Return whole tensors for all parameters: masters and Adam's state."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.parameters.items():
        for key in (f"master/{name}", f"optim/{name}/exp_avg", f"optim/{name}/exp_avg_sq"):
            state[key] = torch.randn(parameter.shape, generator=generator)
    for name, shape in model.buffers.items():
        state[f"buffer/{name}"] = torch.randn(shape, generator=generator)
    return state


def expected_of(model: Model, state: State, layout: Layout) -> dict[str, torch.Tensor]:
    """Return the tensors that a reader must find."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.parameters.items():
        master = parameter.of_ranks(state[f"master/{name}"], layout.tp)
        found[f"model/{name}"] = master.to(layout.dtype)
        if layout.dtype != torch.float32:
            found[f"optim/{name}/master_param"] = master
        for slot in ("exp_avg", "exp_avg_sq"):
            found[f"optim/{name}/{slot}"] = parameter.of_ranks(
                state[f"optim/{name}/{slot}"], layout.tp
            )
        found[f"optim/{name}/step"] = torch.tensor(3.0)
    for name in model.buffers:
        found[f"model/{name}"] = state[f"buffer/{name}"]
    return found


class Writer:
    """Writes one checkpoint."""

    def __init__(self, directory: Path, model: Model, state: State, layout: Layout) -> None:
        self._model, self._state, self._layout = model, state, layout
        self._directory = directory / "global_step3"
        self._directory.mkdir(parents=True)
        (directory / "latest").write_text("global_step3")

    def write(self) -> None:
        """Write all files."""
        layout = self._layout
        for stage, rank in itertools.product(range(layout.pp), range(layout.tp)):
            layers = self._layers_of(stage)
            named = self._model.named(layers)
            groups = [
                {name: p for name, p in named.items() if is_decayed(name) is decayed}
                for decayed in (False, True)
            ]
            model_rank = stage * layout.tp + rank
            self._write_model(stage, model_rank, rank, layers, groups)
            if layout.stage == 3:
                self._write_stage_3(model_rank, rank, groups)
            elif layout.stage:
                self._write_partitions(model_rank, rank, groups)

    def _layers_of(self, stage: int) -> range:
        """Return the layers of a stage, as `partition_uniform` of DeepSpeed cuts them."""
        count, stages = len(self._model.layers), self._layout.pp
        chunk, rest = divmod(count, stages)
        bounds = [stage * chunk + min(stage, rest) for stage in range(stages + 1)]
        return range(bounds[stage], bounds[stage + 1])

    def _slice(self, key: str, parameter: Parameter, rank: int) -> torch.Tensor:
        return parameter.slice(self._state[key], rank, self._layout.tp)

    @property
    def _is_pipeline(self) -> bool:
        given = self._layout.is_pipeline
        return self._layout.pp > 1 if given is None else given

    def _write_model(
        self, stage: int, model_rank: int, rank: int, layers: range,
        groups: Sequence[Mapping[str, Parameter]],
    ) -> None:  # fmt: skip
        layout = self._layout
        named = self._model.named(layers)
        module: OrderedDict[str, torch.Tensor] | None = OrderedDict()
        for name, parameter in named.items():
            module[name] = self._slice(f"master/{name}", parameter, rank).to(layout.dtype)
        buffers = [name for name in self._model.buffers if int(name.partition(".")[0]) in layers]
        for name in buffers:
            module[name] = self._state[f"buffer/{name}"]
        if self._is_pipeline:
            self._write_layers(layers, rank, module)
            module = None
        elif layout.stage == 3:
            module = OrderedDict(
                (name, tensor if name in buffers else torch.empty(0, dtype=tensor.dtype))
                for name, tensor in module.items()
            )
        content: dict[str, Any] = {
            "module": module,
            "buffer_names": buffers,
            "optimizer": self._plain_optimizer(rank, groups) if not layout.stage else None,
            "param_shapes": None if not layout.stage else [
                OrderedDict(
                    (name, self._slice(f"master/{name}", p, rank).shape)
                    for name, p in group.items()
                )
                for group in groups
            ],
            "frozen_param_shapes": OrderedDict() if layout.stage > 1 else None,
            "shared_params": {},
            "frozen_param_fragments": OrderedDict() if layout.stage > 1 else None,
            "lr_scheduler": None,
            "skipped_steps": 0,
            "global_steps": 3,
            "global_samples": 3 * layout.dp,
            "dp_world_size": layout.zero_ranks,
            "mp_world_size": layout.tp * layout.pp,
            "checkpoint_parallel_dimensions": {"pp_degree": layout.pp, "tp_degree": layout.tp},
            "ds_config": {"bf16": {"enabled": layout.dtype == torch.bfloat16}},
            "ds_version": "0.19.8",
            "epoch": 2,
            "own": model_rank,
            "universal_checkpoint_info": dict(self._model.info),
        }  # fmt: skip
        if layout.stage == 3:
            for number in range(layout.zero_ranks):
                name = f"zero_pp_rank_{number}_mp_rank_{model_rank:02d}_model_states.pt"
                torch.save(content, self._directory / name)
        else:
            torch.save(content, self._directory / f"mp_rank_{model_rank:02d}_model_states.pt")

    def _write_layers(self, layers: range, rank: int, module: Mapping[str, torch.Tensor]) -> None:
        seen: set[str] = set()
        for number in layers:
            key = self._model.tied.get(number)
            # The second use of a tied layer is a function, which has no state of its own.
            if key is not None and (key in seen or number > min(self._of_key(key))):
                continue
            seen.add(key or "")
            prefix = f"{number}." if key is None else f"tied_modules.{key}."
            own = OrderedDict(
                (name.removeprefix(prefix), tensor.clone())
                for name, tensor in module.items()
                if name.startswith(prefix)
            )
            # DeepSpeed's topology has the axis also with one rank.
            torch.save(
                own, self._directory / f"layer_{number:02d}-model_{rank:02d}-model_states.pt"
            )

    def _of_key(self, key: str) -> list[int]:
        return [number for number, own in self._model.tied.items() if own == key]

    def _plain_optimizer(
        self, rank: int, groups: Sequence[Mapping[str, Parameter]]
    ) -> dict[str, Any]:
        state: dict[int, dict[str, torch.Tensor]] = {}
        listed = []
        for decayed, group in enumerate(groups):
            numbers = range(len(state), len(state) + len(group))
            for name, parameter in group.items():
                state[len(state)] = {
                    "step": torch.tensor(3.0),
                    **{
                        slot: self._slice(f"optim/{name}/{slot}", parameter, rank)
                        for slot in ("exp_avg", "exp_avg_sq")
                    },
                }
            listed.append(
                {
                    **self._options(decayed), "params": list(numbers), "param_names": list(group)
                }
            )  # fmt: skip
        return {"state": state, "param_groups": listed}

    def _options(self, decayed: int) -> dict[str, Any]:
        return {"lr": 0.02 if decayed else 0.01, "weight_decay": 0.1 if decayed else 0.0}

    def _write_partitions(
        self, model_rank: int, rank: int, groups: Sequence[Mapping[str, Parameter]]
    ) -> None:
        ranks = self._layout.zero_ranks
        states: list[dict[int, dict[str, torch.Tensor]]] = [{} for _ in range(ranks)]
        masters: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        mappings: list[list[Any]] = [[] for _ in range(ranks)]
        paddings: list[list[int]] = [[] for _ in range(ranks)]
        for number, group in enumerate(groups):
            flat = {
                slot: torch.cat(
                    [
                        self._slice(key.format(name), p, rank).reshape(-1)
                        for name, p in group.items()
                    ]
                    or [torch.zeros(0)]
                )
                for slot, key in (
                    ("fp32", "master/{}"),
                    ("exp_avg", "optim/{}/exp_avg"),
                    ("exp_avg_sq", "optim/{}/exp_avg_sq"),
                )
            }
            total = flat["fp32"].numel()
            unit = ALIGNMENT * ranks
            partition = -(-total // unit) * unit // ranks
            for own in range(ranks):
                begin, end = own * partition, (own + 1) * partition
                padding = max(0, end - max(total, begin))
                masters[own].append(flat["fp32"][begin:end].clone())
                states[own][number] = {
                    "step": torch.tensor(3.0),
                    **{
                        slot: torch.cat([flat[slot][begin:end], torch.full((padding,), 9.0)])
                        for slot in ("exp_avg", "exp_avg_sq")
                    },
                }
                paddings[own].append(padding)
                mappings[own].append(self._mapping(group, rank, begin, end))
        prefix = "bf16_" if self._layout.dtype == torch.bfloat16 else ""
        for own in range(ranks):
            content = {
                "optimizer_state_dict": {
                    "loss_scaler": None,
                    "dynamic_loss_scale": False,
                    "overflow": False,
                    "clip_grad": 0.0,
                    "base_optimizer_state": {
                        "state": states[own],
                        "param_groups": [
                            {**self._options(n), "params": [n]} for n in range(len(groups))
                        ],
                    },
                    "single_partition_of_fp32_groups": masters[own],
                    "zero_stage": zero_stage(self._layout.stage),
                    "group_paddings": paddings[own],
                    "partition_count": [ranks] * len(groups),
                    "ds_version": "0.19.8",
                    "param_slice_mappings": mappings[own],
                },
                "ds_config": {},
                "ds_version": "0.19.8",
            }
            name = f"{prefix}zero_pp_rank_{own}_mp_rank_{model_rank:02d}_optim_states.pt"
            torch.save(content, self._directory / name)

    def _mapping(
        self, group: Mapping[str, Parameter], rank: int, begin: int, end: int
    ) -> OrderedDict[str, Any]:
        found: OrderedDict[str, Any] = OrderedDict()
        position = 0
        for name, parameter in group.items():
            count = self._slice(f"master/{name}", parameter, rank).numel()
            first, last = max(position, begin), min(position + count, end)
            if first < last:
                found[name] = address(start=first - begin, numel=last - first)
            position += count
        return found

    def _write_stage_3(
        self, model_rank: int, rank: int, groups: Sequence[Mapping[str, Parameter]]
    ) -> None:
        ranks = self._layout.zero_ranks
        prefix = "bf16_" if self._layout.dtype == torch.bfloat16 else ""
        for own in range(ranks):
            flat: dict[str, list[torch.Tensor]] = {}
            for slot, key in (
                ("fp32", "master/{}"),
                ("exp_avg", "optim/{}/exp_avg"),
                ("exp_avg_sq", "optim/{}/exp_avg_sq"),
            ):
                flat[slot] = [
                    torch.cat([self._part(key.format(name), p, rank, own) for name, p in g.items()])
                    for g in groups
                ]
            content = {
                "optimizer_state_dict": {
                    "zero_stage": zero_stage(3),
                    "loss_scaler": None,
                    "dynamic_loss_scale": False,
                    "overflow": False,
                    "partition_count": ranks,
                    "optimizer_state_dict": {
                        "state": {
                            n: {
                                "step": torch.tensor(3.0),
                                **{slot: flat[slot][n] for slot in ("exp_avg", "exp_avg_sq")},
                            }
                            for n in range(len(groups))
                        },
                        "param_groups": [
                            {**self._options(n), "params": [n]} for n in range(len(groups))
                        ],
                    },
                    "fp32_flat_groups": flat["fp32"],
                },
                "ds_config": {},
                "ds_version": "0.19.8",
            }
            name = f"{prefix}zero_pp_rank_{own}_mp_rank_{model_rank:02d}_optim_states.pt"
            torch.save(content, self._directory / name)

    def _part(self, key: str, parameter: Parameter, rank: int, own: int) -> torch.Tensor:
        flat = self._slice(key, parameter, rank).reshape(-1)
        most = math.ceil(flat.numel() / self._layout.zero_ranks)
        part = flat[own * most : (own + 1) * most]
        return torch.cat([part, torch.full((most - part.numel(),), 9.0)])


def address(start: int, numel: int) -> Any:
    """Return where a slice is, as DeepSpeed's class of the name that `stand_ins` makes."""
    made = sys.modules["deepspeed.utils.tensor_fragment"].fragment_address()
    made.start, made.numel = start, numel
    return made


def zero_stage(number: int) -> Any:
    """Return a stage as DeepSpeed's enumeration, which `stand_ins` makes."""
    return sys.modules["deepspeed.runtime.zero.config"].ZeroStageEnum(number)


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Let `torch.load` and `torch.save` find stand-ins for the classes in DeepSpeed's files."""
    before = {name for name in sys.modules if name.partition(".")[0] == "deepspeed"}
    assert not before, "DeepSpeed itself is here"
    try:
        for module, name in (
            ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
            ("deepspeed.utils.tensor_fragment", "fragment_address"),
            ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
        ):
            holder = ModuleType(module)
            setattr(holder, name, type(name, (), {"__module__": module}))
            sys.modules[module] = holder
        config = ModuleType("deepspeed.runtime.zero.config")
        config.ZeroStageEnum = enum.IntEnum(  # type: ignore[attr-defined]
            "ZeroStageEnum", {"zero": 0, "one": 1, "two": 2, "three": 3}, module=config.__name__
        )
        sys.modules[config.__name__] = config
        for module in [name for name in sys.modules if name.startswith("deepspeed.")]:
            parts = module.split(".")
            for count in range(1, len(parts)):
                parent = ".".join(parts[:count])
                sys.modules.setdefault(parent, ModuleType(parent))
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
            del sys.modules[name]


def write(directory: Path, model: Model, state: State, layout: Layout) -> Path:
    """Write a checkpoint, and return the directory of the run."""
    with stand_ins():
        Writer(directory, model, state, layout).write()
    return directory
