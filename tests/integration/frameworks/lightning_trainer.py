"""Trains a small model by Lightning's Trainer, and records each step's samples and loss."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

from keepstep.integrations.lightning import KeepstepCallback, placement

options = json.loads(sys.argv[1])
log = Path(options["log"])
generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
rank = int(os.environ["RANK"])


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(16, generator=torch.Generator().manual_seed(index))


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 64), nn.Dropout(options["dropout"]), nn.ReLU(), nn.Linear(64, 16)
        )

    def configure_model(self) -> None:
        if options["strategy"] == "fsdp2":
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def on_train_start(self) -> None:
        # Other draws than those of the state that is restored.
        torch.rand(3)

    def on_train_epoch_start(self) -> None:
        torch.rand(1)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        self.drawn = torch.rand(1).item()
        return (self.net(batch[1]) - batch[1]).square().mean()

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("error", (self.net(batch[1]) - batch[1]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        decay = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.99)
        # No epoch is good enough.
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.9, patience=0, threshold=0.99
        )
        return [optimizer], [
            {"scheduler": decay, "interval": "step"},
            {"scheduler": plateau, "interval": "epoch", "monitor": "error"},
        ]


class Record(Callback):
    """Its state is Trainer's to save."""

    def __init__(self) -> None:
        self.path = log / f"rank-{rank}.{os.getpid()}.jsonl"
        self.read: list[int] = []
        self.losses: list[float] = []
        self.step = 0
        self.validated: list[int] = []
        self.epochs: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "validated": self.validated, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, number: int
    ) -> None:
        self.read += batch[0].tolist()
        self.losses.append(outputs["loss"].item())
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        line = {
            "step": self.step,
            "generation": generation,
            "rank": trainer.global_rank,
            "samples": self.read,
            "loss": sum(self.losses).hex(),
            "rate": trainer.optimizers[0].param_groups[0]["lr"],
            "world_size": trainer.world_size,
            "validated": self.validated,
            "epochs": self.epochs,
            "drawn": trainer.lightning_module.drawn,
            "logged": trainer.fit_loop.epoch_loop._batches_that_stepped,
            "answers_notices": signal.getsignal(signal.SIGTERM).__module__,
        }
        with self.path.open("a") as file:
            print(json.dumps(line), file=file)
        self.read, self.losses = [], []
        if not (log / "hurry").exists():
            time.sleep(options.get("pause_s", 0.0))

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validated = [*self.validated, trainer.global_step]

    def on_exception(
        self, trainer: Trainer, module: LightningModule, exception: BaseException
    ) -> None:
        (log / "failed").touch()

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.epochs = [*self.epochs, trainer.current_epoch]
        trainer.should_stop |= trainer.global_step == options.get("stop_at")


torch.manual_seed(0)
module = Module()
protection = KeepstepCallback(
    checkpoint=options.get("checkpoint"), snapshot_every=options.get("snapshot_every", 1), seed=7
)
trainer = Trainer(
    **placement(),
    accelerator="cpu",
    strategy=(
        ModelParallelStrategy(
            data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1
        )
        if options["strategy"] == "fsdp2"
        else options["strategy"]
    ),
    callbacks=[protection, Record()],
    max_epochs=options["epochs"],
    max_steps=options.get("max_steps", -1),
    accumulate_grad_batches=2,
    val_check_interval=options["validate_every"],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=str(log / "output"),
)
trainer.fit(
    module,
    protection.loader(Numbers(), global_batch=8),
    DataLoader(Numbers(), batch_size=8),
)
