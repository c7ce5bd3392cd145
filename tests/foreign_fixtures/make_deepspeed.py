"""Makes the checkpoints of DeepSpeed in `tests/foreign_fixtures/deepspeed`, and what they hold.

Run where DeepSpeed is installed (tried with 0.19.8 and torch 2.13, on CPUs):

    DS_ACCELERATOR=cpu python tests/foreign_fixtures/make_deepspeed.py tests/foreign_fixtures

The model has what readers get wrong: sizes that need padding, two groups of the optimizer in
another order than the module's, tied weights, a frozen parameter, a buffer, and in stage 3 several
sub-groups. Gradients are given numbers, the same on all ranks, so that plain AdamW on unsharded
float32 copies has the state that DeepSpeed must arrive at, bit for bit; it is in `expected.pt`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.checkpoint import ds_to_universal
from torch import nn

STEPS = 3
SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
CASES = {
    # name: stage, data type, ranks, more of the configuration
    "zero1_bf16_4": (1, "bf16", 4, {}),
    "zero1_fp32_2": (1, "fp32", 2, {}),
    "zero2_bf16_2": (2, "bf16", 2, {}),
    "zero2_fp16_2": (2, "fp16", 2, {}),
    "zero3_bf16_2": (3, "bf16", 2, {"sub_group_size": 40}),
    "zero3_fp32_4": (3, "fp32", 4, {}),
}
UNIVERSAL = ("zero2_bf16_2", "zero3_bf16_2")


class Product(nn.Module):
    """Multiplies its weight by given numbers, which are so the weight's gradient."""

    def __init__(self, *shape: int, is_trained: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape), requires_grad=is_trained)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return (self.weight * numbers.to(self.weight.dtype)).sum()


class Model(nn.Module):
    """Odd sizes, tied weights, a frozen parameter, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Product(11, 6)
        self.norm = Product(5)
        self.odd = Product(7, 5)
        self.frozen = Product(3, 11, is_trained=False)
        self.bias = Product(3)
        self.deep = Product(2, 3, 4)
        self.head = Product(11, 6)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor([5.0, 7.0]))

    def forward(self, numbers: dict[str, torch.Tensor]) -> torch.Tensor:
        losses = [self.get_submodule(name)(values).float() for name, values in numbers.items()]
        return torch.stack(losses).sum()


SHAPES = {"embed": (11, 6), "norm": (5,), "odd": (7, 5), "bias": (3,), "deep": (2, 3, 4)}
# By the optimizer: what is not decayed first, which is not the module's order.
GROUPS = (("norm", "bias"), ("embed", "odd", "deep"))


def numbers_of(step: int) -> dict[str, torch.Tensor]:
    """Return the gradients of a step: numbers that all data types have."""
    generator = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.randint(-8, 9, shape, generator=generator).float() / 8
        for name, shape in SHAPES.items()
    }


def groups_of(tensors: dict[str, torch.Tensor]) -> list[dict[str, object]]:
    return [
        {"params": [tensors[name] for name in GROUPS[0]], "weight_decay": 0.0, "lr": 0.01},
        {"params": [tensors[name] for name in GROUPS[1]], "weight_decay": 0.1, "lr": 0.02},
    ]


def expected(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the state that training arrives at, from plain AdamW on float32 copies."""
    torch.manual_seed(5)
    model = Model().to(dtype)
    masters = {
        name: model.get_submodule(name).weight.detach().float().requires_grad_() for name in SHAPES
    }
    optimizer = torch.optim.AdamW(groups_of(masters))
    for step in range(STEPS):
        for name, gradient in numbers_of(step).items():
            masters[name].grad = gradient
        optimizer.step()
    state = {"model/frozen.weight": model.frozen.weight.detach()}
    for name, master in masters.items():
        state[f"model/{name}.weight"] = master.detach().to(dtype)
        state[f"master/{name}.weight"] = master.detach()
        for slot in ("exp_avg", "exp_avg_sq", "step"):
            state[f"optim/{name}.weight/{slot}"] = optimizer.state[master][slot]
    return state


def train(rank: int, directory: str, stage: int, kind: str, world: int, more: dict) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29577"),
    }  # fmt: skip
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(5)
    # Partitioned by DeepSpeed from equal copies.
    model = Model().to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, torch.float32))
    weights = {name: model.get_submodule(name).weight for name in SHAPES}
    optimizer = torch.optim.AdamW(groups_of(weights))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=100),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": kind == "bf16"},
            "fp16": {"enabled": kind == "fp16", "loss_scale": 8.0},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more},
        },
    )
    for step in range(STEPS):
        loss = engine(numbers_of(step))
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(directory, client_state={"epoch": 2, "tokens": [128, 256]})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)


def without_scripts(directory: Path) -> None:
    """Remove the scripts that DeepSpeed copies into each checkpoint."""
    for name in SCRIPTS:
        for script in directory.rglob(name):
            script.unlink()


def main(root: Path) -> None:
    for name, (stage, kind, world, more) in CASES.items():
        directory = root / "deepspeed" / name
        shutil.rmtree(directory, ignore_errors=True)
        arguments = (str(directory), stage, kind, world, more)
        mp.start_processes(train, args=arguments, nprocs=world, start_method="spawn")
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, torch.float32)
        torch.save(expected(dtype), directory / "expected.pt")
        without_scripts(directory)
        print(name, flush=True)
    for name in UNIVERSAL:
        source, directory = root / "deepspeed" / name, root / "deepspeed" / f"{name}_universal"
        shutil.rmtree(directory, ignore_errors=True)
        tag = (source / "latest").read_text().strip()
        command = [
            sys.executable, ds_to_universal.__file__,
            "--input_folder", str(source / tag),
            "--output_folder", str(directory / f"{tag}_universal"),
            "--inject_missing_state",
            "--num_extract_workers", "1", "--num_merge_workers", "1",
        ]  # fmt: skip
        subprocess.run(command, check=True)
        (source / "latest_universal").unlink(missing_ok=True)
        (directory / "latest_universal").write_text(f"{tag}_universal")
        shutil.copy(source / "expected.pt", directory)
        print(directory.name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
