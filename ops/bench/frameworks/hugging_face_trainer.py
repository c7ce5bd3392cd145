"""Trains by Hugging Face's Trainer, and resumes from its newest checkpoint."""

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from ops.bench.frameworks.plan import EPOCHS, GLOBAL_BATCH, SAVE_EVERY
from ops.bench.frameworks.workload import DIRECTORY, Model, Rows

torch.manual_seed(0)
output = DIRECTORY / "output"
output.mkdir(exist_ok=True)
trainer = Trainer(
    model=Model(),
    args=TrainingArguments(
        output_dir=str(output),
        per_device_train_batch_size=GLOBAL_BATCH // 2,
        num_train_epochs=EPOCHS,
        learning_rate=1e-3,
        save_strategy="steps",
        save_steps=SAVE_EVERY,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=Rows(),
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(output))
