"""Makes checkpoints of DeepSpeed with model parallelism, and what they hold.

Run where DeepSpeed is installed (tried with 0.19.8 and torch 2.13, on CPUs):

    DS_ACCELERATOR=cpu python tests/foreign_fixtures/make_deepspeed_parallel.py \
        tests/foreign_fixtures [CASE ...]

The pipelines are DeepSpeed's `PipelineModule` with layers that are cut by hand as Megatron's are:
tied and padded embeddings, fused projections, replicated norms. Gradients are given numbers, each
rank's part of the same whole ones, so that plain AdamW on unsharded float32 copies has the state
that DeepSpeed must arrive at, bit for bit; it is in `expected.pt`, by the names in the module.
What AutoTP's checkpoints hold is what DeepSpeed's own `ds_to_universal` makes of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.checkpoint import ds_to_universal
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import (
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
)
from torch import nn

STEPS = 2
SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
PIPELINES = {
    # name: tensor parallelism, stages, data parallelism, stage of ZeRO, data type
    "pipe_2_2_2_zero1_bf16": (2, 2, 2, 1, "bf16"),
    "pipe_1_2_2_zero1_fp32": (1, 2, 2, 1, "fp32"),
    "pipe_2_2_1_zero0_fp32": (2, 2, 1, 0, "fp32"),
    # Without a pipeline's engine: a module of the same names, and a grid of ranks.
    "cut_2_1_2_zero2_bf16": (2, 1, 2, 2, "bf16"),
}
AUTO_TP = {
    # name: tensor parallelism, data parallelism, stage of ZeRO
    "autotp_2_2_zero1_bf16": (2, 2, 1),
    "autotp_2_1_zero3_bf16": (2, 1, 3),
}
UNIVERSAL = ("pipe_2_2_2_zero1_bf16", "autotp_2_2_zero1_bf16", "autotp_2_1_zero3_bf16")

HIDDEN, FFN, VOCABULARY, PADDED = 6, 10, 11, 12
# Of each kind of layer, its parameters: the whole shape, and how tensor parallelism cuts it: the
# dimension, parts of one size along it, or None for copies.
KINDS: dict[str, dict[str, tuple[tuple[int, ...], int | None, int]]] = {
    "embed": {"weight": ((PADDED, HIDDEN), 0, 1)},
    "block": {
        "norm": ((HIDDEN,), None, 1),
        "qkv": ((3 * 4, HIDDEN), 0, 3),
        "dense": ((HIDDEN, 4), 1, 1),
        "fc1": ((2 * FFN, HIDDEN), 0, 2),
        "fc2": ((HIDDEN, FFN), 1, 1),
        "bias": ((FFN,), 0, 1),
    },
    "final": {"norm": ((HIDDEN,), None, 1)},
}
LAYERS = ("embed", "block", "block", "final", "embed")
INFO = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": VOCABULARY,
    "vocabulary_parameter_patterns": [r"tied_modules.embed.weight"],
    "pipeline_replicated_parameter_patterns": [r"tied_modules.embed.weight"],
    "tp_replicated_parameter_patterns": [r"\d+.norm"],
    "parameter_with_row_parallelism_patterns": [r"\d+.dense", r"\d+.fc2"],
    "parameter_with_2_sub_params_cat_dim_0": [r"\d+.fc1"],
    "parameter_with_sub_params": [
        {"patterns": [r"\d+.qkv"], "shape": ((4, 4, 4), HIDDEN), "partition_dim": 0}
    ],
}


def own_part(whole: torch.Tensor, dim: int | None, parts: int, rank: int, ranks: int):
    """Return what a rank of tensor parallelism has of a parameter."""
    if dim is None:
        return whole.clone()
    slices = [part.chunk(ranks, dim)[rank] for part in whole.chunk(parts, dim)]
    return torch.cat(slices, dim).clone()


def whole_of(name: str, shape: tuple[int, ...], seed: int, kind: str) -> torch.Tensor:
    """Return a parameter's first values, or a step's gradients: numbers that all types have."""
    generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
    numbers = torch.randint(-64, 65, shape, generator=generator).float() / 64
    return numbers if kind == "values" else numbers.mul(8).round() / 8


class Layer(nn.Module):
    """Adds to a sum its parameters times given numbers, which are so their gradients."""

    def __init__(self, number: int, kind: str, rank: int, ranks: int) -> None:
        super().__init__()
        self.number, self.kind, self.rank, self.ranks = number, kind, rank, ranks
        for name, (shape, dim, parts) in KINDS[kind].items():
            values = whole_of(name_of(number, kind, name), shape, 1, "values")
            part = own_part(values, dim, parts, rank, ranks)
            self.register_parameter(name, nn.Parameter(part))
        if kind == "block":
            self.register_buffer("seen", torch.tensor([5.0, 7.0]))

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        total, step = state[0], int(state[1])
        for name, parameter in self.named_parameters():
            shape, dim, parts = KINDS[self.kind][name]
            whole = gradient_of(self.number, self.kind, name, shape, step)
            numbers = own_part(whole, dim, parts, self.rank, self.ranks)
            total = total + (parameter * numbers.to(parameter.dtype)).sum()
        return torch.stack([total, state[1]])


class Plain(nn.Module):
    """The pipeline's layers in one module, by the same names."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict({"embed": Layer(0, "embed", rank, ranks)})
        for number, kind in enumerate(LAYERS):
            if kind != "embed":
                self.add_module(str(number), Layer(number, kind, rank, ranks))

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        for number, kind in enumerate(LAYERS):
            tied = self.tied_modules["embed"]
            state = (tied if kind == "embed" else self.get_submodule(str(number)))(state)
        return state


def head(layer: Layer, state: torch.Tensor) -> torch.Tensor:
    return layer(state)


def name_of(number: int, kind: str, name: str) -> str:
    return f"tied_modules.embed.{name}" if kind == "embed" else f"{number}.{name}"


def gradient_of(number: int, kind: str, name: str, shape: tuple[int, ...], step: int):
    return whole_of(name_of(number, kind, name), shape, 100 + step, "gradients")


def names_and_shapes() -> dict[str, tuple[int, ...]]:
    return {
        name_of(number, kind, name): shape
        for number, kind in enumerate(LAYERS)
        for name, (shape, _, _) in KINDS[kind].items()
    }


def is_decayed(name: str) -> bool:
    return not name.endswith(("norm", "bias"))


def groups_of(named: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the groups of the optimizer: what is not decayed first."""
    return [
        {
            "params": [p for name, p in named.items() if is_decayed(name) is decayed],
            "weight_decay": 0.1 if decayed else 0.0,
            "lr": 0.02 if decayed else 0.01,
        }
        for decayed in (False, True)
    ]


def expected(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the state that training arrives at, from plain AdamW on float32 copies."""
    named = {
        name: whole_of(name, shape, 1, "values").to(dtype).float().requires_grad_()
        for name, shape in names_and_shapes().items()
    }
    optimizer = torch.optim.AdamW(groups_of(named))
    for step in range(STEPS):
        for name, parameter in named.items():
            gradient = whole_of(name, tuple(parameter.shape), 100 + step, "gradients")
            # The embedding is used twice.
            times = 2 if name.startswith("tied") else 1
            parameter.grad = gradient * times
        optimizer.step()
    state = {}
    for name, master in named.items():
        state[f"model/{name}"] = master.detach().to(dtype)
        state[f"master/{name}"] = master.detach()
        for slot in ("exp_avg", "exp_avg_sq", "step"):
            state[f"optim/{name}/{slot}"] = optimizer.state[master][slot]
    return state


def start(rank: int, world: int) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29577"),
    }  # fmt: skip
    torch.set_num_threads(1)
    # What DeepSpeed would compile for ranks of one machine changes no file.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")


def config_of(stage: int, kind: str, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": kind == "bf16"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def train_pipeline(
    rank: int, directory: str, tp: int, pp: int, dp: int, stage: int, kind: str
) -> None:
    start(rank, tp * pp * dp)
    topology = PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp)
    own = topology.get_coord(rank).model
    layers: list[Any] = []
    for number, layer in enumerate(LAYERS):
        arguments = (Layer, number, layer, own, tp)
        if layer == "embed":
            forward = None if number == 0 else head
            layers.append(
                TiedLayerSpec("embed", *arguments, forward_fn=forward, tied_weight_attr="weight")
            )
        else:
            layers.append(LayerSpec(*arguments))
    dtype = {"bf16": torch.bfloat16}.get(kind, torch.float32)
    module: nn.Module
    if stage < 2:
        module = PipelineModule(
            layers, topology=topology, loss_fn=lambda state, _: state[0].float(),
            partition_method="uniform",
        )  # fmt: skip
        grid = None
    else:
        module = Plain(own, tp)
        grid = PipelineParallelGrid(topology)
    module.to(dtype)
    optimizer = torch.optim.AdamW(groups_of(dict(module.named_parameters())))
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=config_of(stage, kind), mpu=grid
    )
    for step in range(STEPS):
        state = torch.tensor([0.0, float(step)], dtype=dtype, requires_grad=True)
        if grid is None:
            engine.train_batch(iter([(state, torch.zeros(1))]))
        else:
            engine.backward(engine(state)[0].float())
            engine.step()
    client = {"epoch": 2, "own": rank, "universal_checkpoint_info": INFO}
    engine.save_checkpoint(directory, client_state=client)
    torch.distributed.barrier()
    os._exit(0)


class Block(nn.Module):
    """Linear layers that AutoTP cuts, also a fused one, and a norm, which it leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv_proj = nn.Linear(8, 16)
        self.o_proj = nn.Linear(8, 8)
        self.gate_up_proj = nn.Linear(8, 12, bias=False)
        self.down_proj = nn.Linear(6, 8, bias=False)
        self.register_buffer("seen", torch.tensor([5.0, 7.0]))

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(self.norm(state))
        half = qkv.shape[-1] // 2
        state = state + self.o_proj(qkv[..., :half])
        gate, up = self.gate_up_proj(state).chunk(2, -1)
        return state + self.down_proj(gate * up)


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            state = layer(state)
        return state.float().square().sum()


def train_auto_tp(rank: int, directory: str, tp: int, dp: int, stage: int) -> None:
    start(rank, tp * dp)
    torch.manual_seed(5)
    model = Linears().to(torch.bfloat16)
    plan = {
        "autotp_size": tp,
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [
                {"patterns": [r".*(o|down)_proj\.weight$"], "partition_type": "row"},
                {
                    "patterns": [r".*qkv_proj\.weight$"], "partition_type": "column",
                    "shape": [[8, 4, 4], -1], "partition_dim": 0,
                },
                {
                    "patterns": [r".*gate_up_proj\.weight$"], "partition_type": "column",
                    "shape": [2, -1], "partition_dim": 0,
                },
            ],
        },
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config_of(
            stage, "bf16", tensor_parallel=plan,
            optimizer={"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        ),
    )  # fmt: skip
    for step in range(STEPS):
        torch.manual_seed(step)
        engine.backward(engine(torch.randn(2, 8).to(torch.bfloat16)))
        engine.step()
    engine.save_checkpoint(directory, client_state={"epoch": 2})
    torch.distributed.barrier()
    os._exit(0)


def convert(root: Path, name: str) -> None:
    """Let DeepSpeed's own tool make a universal checkpoint."""
    source, directory = root / "deepspeed" / name, root / "deepspeed" / f"{name}_universal"
    shutil.rmtree(directory, ignore_errors=True)
    tag = (source / "latest").read_text().strip()
    command = [
        sys.executable, ds_to_universal.__file__,
        "--input_folder", str(source / tag), "--output_folder", str(directory / f"{tag}_universal"),
        "--num_extract_workers", "1", "--num_merge_workers", "1", "--no_strict",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    (source / "latest_universal").unlink(missing_ok=True)
    (directory / "latest_universal").write_text(f"{tag}_universal")
    if (source / "expected.pt").exists():
        shutil.copy(source / "expected.pt", directory)


def without_scripts(directory: Path) -> None:
    """Remove the scripts that DeepSpeed copies into each checkpoint."""
    for name in SCRIPTS:
        for script in directory.rglob(name):
            script.unlink()


def main(root: Path, wanted: list[str]) -> None:
    for name, (tp, pp, dp, stage, kind) in PIPELINES.items():
        if wanted and name not in wanted:
            continue
        directory = root / "deepspeed" / name
        shutil.rmtree(directory, ignore_errors=True)
        arguments = (str(directory), tp, pp, dp, stage, kind)
        mp.start_processes(train_pipeline, args=arguments, nprocs=tp * pp * dp, start_method="fork")
        dtype = {"bf16": torch.bfloat16}.get(kind, torch.float32)
        torch.save(expected(dtype), directory / "expected.pt")
        without_scripts(directory)
        print(name, flush=True)
    for name, (tp, dp, stage) in AUTO_TP.items():
        if wanted and name not in wanted:
            continue
        directory = root / "deepspeed" / name
        shutil.rmtree(directory, ignore_errors=True)
        mp.start_processes(
            train_auto_tp,
            args=(str(directory), tp, dp, stage),
            nprocs=tp * dp,
            start_method="fork",
        )
        without_scripts(directory)
        print(name, flush=True)
    for name in UNIVERSAL:
        if not wanted or name in wanted:
            convert(root, name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
