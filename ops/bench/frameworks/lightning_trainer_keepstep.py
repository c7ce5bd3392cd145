"""Trains by Lightning's Trainer, and resumes from its newest checkpoint."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from keepstep.integrations.lightning import KeepstepCallback, placement
from ops.bench.frameworks.plan import EPOCHS, GLOBAL_BATCH, SAVE_EVERY
from ops.bench.frameworks.workload import DIRECTORY, Model, Rows


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return self.model(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


torch.manual_seed(0)
dataset = Rows()
saves = ModelCheckpoint(DIRECTORY, save_last=True, every_n_train_steps=SAVE_EVERY)
protection = KeepstepCallback()
trainer = Trainer(
    **placement(),
    strategy="ddp",
    accelerator="cpu",
    callbacks=[protection, saves],
    max_epochs=EPOCHS,
    logger=False,
    enable_progress_bar=False,
)
loader = protection.loader(dataset, GLOBAL_BATCH)
trainer.fit(Module(), loader, ckpt_path="last")
