"""DeepSpeed's own loader reads what is written for it: ZeRO 1, 2 and 3, and Universal.

A run trains three steps, is saved, and goes on with a fourth. What keepstep makes of the saved
files is loaded into fresh engines, whose state, logits and fourth step must be the run's. All ranks
have the same batch, so that the number of ranks changes no gradient.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.checkpoint import ds_to_universal
from torch import nn

from tests.convert.checkpoints import convert, read
from tests.convert.checks import Checks, assert_close, assert_equal

REQUIREMENTS = ("deepspeed==0.19.8",)

STEPS = 3
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Model(nn.Module):
    """Tied weights, a frozen layer, buffers, odd sizes."""

    def __init__(self, seed: int, frozen_seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(31, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.LayerNorm(6)
        self.odd = nn.Linear(6, 7)
        self.back = nn.Linear(7, 6)
        self.head = nn.Linear(6, 31, bias=False)
        self.head.weight = self.embedding.weight
        torch.manual_seed(frozen_seed)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.randn(6))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        hidden = self.back(self.odd(hidden).tanh()) + self.shift
        result: torch.Tensor = self.head(self.norm(self.frozen(hidden)))
        return result


@dataclass(frozen=True, slots=True)
class Run:
    """How an engine trains: stage of ZeRO, data type, ranks, and more of `zero_optimization`."""

    stage: int
    kind: str
    ranks: int
    more: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        more = "".join(f", {name} {value}" for name, value in self.more)
        return f"ZeRO {self.stage}, {self.kind}, {self.ranks} ranks{more}"


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with what is not decayed first, which is not the module's order."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0, "lr": 0.01},
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1, "lr": 0.02},
        ]
    )


def batch(number: int) -> torch.Tensor:
    """Return the batch of a step, the same on all ranks."""
    return torch.randint(31, (4, 9), generator=torch.Generator().manual_seed(number))


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


def engine_of(model: nn.Module, run: Run, *, is_universal: bool) -> Any:
    """Return DeepSpeed's engine for a model."""
    optimizer = optimizer_of(model)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=100),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": run.kind == "bf16"},
            "zero_optimization": {
                "stage": run.stage,
                "stage3_param_persistence_threshold": 0,
                **dict(run.more),
            },
            "checkpoint": {"load_universal": is_universal},
        },
    )
    return engine


def train(rank: int, run: Run, port: int, task: dict[str, Any]) -> None:
    """Train in one rank: from the beginning and save, or from what is loaded; and go on."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(run.ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    # It would be compiled first, by all processes at a time.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    model = Model(task["seed"], task["frozen_seed"]).to(DTYPES[run.kind])
    engine = engine_of(model, run, is_universal=task.get("universal", False))
    if task.get("load"):
        path, _ = engine.load_checkpoint(
            task["load"], load_lr_scheduler_states=task.get("scheduler", True)
        )
        assert path is not None, f"DeepSpeed found no checkpoint in {task['load']}"
        assert engine.global_steps == STEPS, engine.global_steps
    else:
        for number in range(STEPS):
            engine.backward(loss_of(engine(batch(number)), batch(number)))
            engine.step()
    if task.get("save"):
        engine.save_checkpoint(task["save"], client_state={"epoch": 2})
    engine.eval()
    with torch.no_grad():
        before = engine(batch(99)).float()
    engine.train()
    loss = loss_of(engine(batch(STEPS)), batch(STEPS))
    engine.backward(loss)
    engine.step()
    engine.eval()
    with torch.no_grad():
        after = engine(batch(99)).float()
    if rank == 0:
        torch.save({"before": before, "loss": loss.detach(), "after": after}, task["out"])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def start(run: Run, out: Path, **task: Any) -> dict[str, torch.Tensor]:
    """Run the ranks, and return what the first one has noted."""
    arguments = (run, free_port(), {**task, "out": str(out)})
    # Loading DeepSpeed again in each rank would take most of the time.
    mp.start_processes(train, args=arguments, nprocs=run.ranks, start_method="fork")
    noted: dict[str, torch.Tensor] = torch.load(out, weights_only=True)
    return noted


def same_training(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], run: Run, target: Run
) -> None:
    """Compare logits bit for bit, and those after the next step to the last bits of its sums.

    Stage 3 has a linear layer of its own, which rounds between the product and the sum: what it
    computes in 16 bits is another value by these.
    """
    if (run.stage == 3) == (target.stage == 3):
        assert_equal(found["before"], expected["before"], "logits")
        for name, value in expected.items():
            assert_close(found[name], value)
        return
    # Three units in the last place of the largest logits.
    tolerance = 1e-5 if run.kind == "fp32" else 0.1
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=tolerance, rtol=tolerance)


def check_universal(checks: Checks, directory: Path, run: Run) -> None:
    """Compare what is written with what `ds_to_universal` makes of the same files."""
    tag = (directory / "saved" / "latest").read_text()
    theirs = directory / "theirs" / f"{tag}_universal"
    command = [
        sys.executable, ds_to_universal.__file__,
        "--input_folder", str(directory / "saved" / tag), "--output_folder", str(theirs),
        "--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (directory / "saved" / "latest_universal").unlink(missing_ok=True)
    (directory / "theirs" / "latest_universal").write_text(theirs.name)
    ours = directory / f"universal-{run.stage}" / f"{tag}_universal"
    with checks(f"{run}: every tensor of ds_to_universal is ours"):
        names = sorted(path.relative_to(theirs) for path in theirs.glob("zero/*/*.pt"))
        assert names == sorted(path.relative_to(ours) for path in ours.glob("zero/*/*.pt"))
        assert len(names) > 30, names
        for name in names:
            expected = torch.load(theirs / name, weights_only=True)
            assert_equal(torch.load(ours / name, weights_only=True), expected, str(name))


def check(checks: Checks, directory: Path, run: Run, targets: list[Run]) -> None:
    """Train and save a run, and load what is written of it into engines of other runs."""
    saved = directory / "saved"
    expected = start(run, directory / "out", seed=0, frozen_seed=7, save=str(saved))
    universal = directory / "keepstep"
    convert(saved, universal)
    state = read(universal)
    for stage in {run.stage, *(target.stage for target in targets)}:
        options = ["--zero-stage", "3"] if stage == 3 else []
        convert(
            universal, directory / f"universal-{stage}", "--to", "deepspeed-universal", *options
        )
    check_universal(checks, directory, run)
    for number, target in enumerate(targets):
        written = directory / f"written-{number}"
        with checks(f"{run} -> {target}: DeepSpeed loads it, and training goes on as the run did"):
            convert(
                universal, written, "--to", "deepspeed",
                "--zero-stage", str(target.stage), "--ranks", str(target.ranks),
            )  # fmt: skip
            again = directory / f"again-{number}"
            # Other weights, frozen ones and buffers at first: all must come from the files.
            found = start(
                target, directory / "out", seed=1, frozen_seed=8, load=str(written),
                save=str(again),
            )  # fmt: skip
            assert_equal(read(again), state, "saved again")
            same_training(found, expected, run, target)
        with checks(f"{run} -> Universal -> {target}: as the run did"):
            again = directory / f"again-universal-{number}"
            # The loader leaves what is not trained as the script made it.
            found = start(
                target, directory / "out", seed=1, frozen_seed=7,
                load=str(directory / f"universal-{target.stage}"), save=str(again), universal=True,
            )  # fmt: skip
            assert_equal(read(again), state, "saved again")
            if target.stage == 3:
                # Its loader gives all groups the options of the first, and one tensor with the
                # step, which each of them counts up: the next step is another than the run's.
                found["after"] = expected["after"]
            same_training(found, expected, run, target)
    if run.stage == 3:
        with checks(f"{run}: the next step from Universal is that from ds_to_universal's"):
            after = [
                start(
                    run, directory / "out", seed=1, frozen_seed=7, load=str(directory / name),
                    universal=True,
                )
                for name in ("theirs", "universal-3")
            ]  # fmt: skip
            assert_equal(after[1], after[0])


def check_torch(checks: Checks, directory: Path) -> None:
    """Go on with DeepSpeed where a run with PyTorch alone has ended."""
    model = Model(0, 7)
    optimizer = optimizer_of(model)
    names = {id(p): name for name, p in model.named_parameters()}
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(batch(number)), batch(number)).backward()
        optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": STEPS},
        directory / "run.pt",
    )
    ordered = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    (directory / "names").write_text("\n".join(ordered))
    (directory / "buffers").write_text("\n".join(name for name, _ in model.named_buffers()))
    before = model(batch(99)).detach()
    optimizer.zero_grad()
    loss = loss_of(model(batch(STEPS)), batch(STEPS))
    loss.backward()
    optimizer.step()
    expected = {"before": before, "loss": loss.detach(), "after": model(batch(99)).detach()}
    for stage in (1, 2, 3):
        run = Run(stage, "fp32", 2)
        with checks(f"PyTorch -> {run}: training goes on as it did"):
            written = directory / f"written-{stage}"
            convert(
                directory / "run.pt", written, "--to", "deepspeed", "--zero-stage", str(stage),
                "--ranks", "2", "--parameter-names", directory / "names",
                "--buffers", directory / "buffers",
            )  # fmt: skip
            # The source has no scheduler, whose state DeepSpeed's loader asks for by default.
            found = start(
                run, directory / "out", seed=1, frozen_seed=8, load=str(written), scheduler=False
            )
            for name, value in expected.items():
                assert_close(found[name], value)


def main() -> None:
    """Run the checks."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    # A process with threads cannot be forked.
    torch.set_num_threads(1)
    checks = Checks()
    cases = (
        (Run(2, "bf16", 2), [Run(1, "bf16", 2), Run(2, "bf16", 4), Run(3, "bf16", 2)]),
        (Run(3, "bf16", 2, (("sub_group_size", 40),)), [
            Run(3, "bf16", 2, (("sub_group_size", 40),)), Run(2, "bf16", 2),
        ]),
        (Run(1, "fp32", 2), [Run(1, "fp32", 2), Run(3, "fp32", 4)]),
    )  # fmt: skip
    for run, targets in cases:
        with checks.all_of(str(run)) as directory:
            check(checks, directory, run, targets)
    with checks.all_of("PyTorch") as directory:
        check_torch(checks, directory)
    checks.finish()


if __name__ == "__main__":
    main()
