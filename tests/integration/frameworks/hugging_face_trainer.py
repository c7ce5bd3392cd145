"""Trains a small Llama by Hugging Face's Trainer, and records each step's samples and loss."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
from fsdp2_on_cpus import shard_on_cpus
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from keepstep.integrations.transformers import KeepstepMixin

options = json.loads(sys.argv[1])
log = Path(options["log"])
generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
read: list[int] = []


class Tokens(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids, "number": index}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    read.extend(sample.pop("number") for sample in samples)
    return dict(default_data_collator(samples))


class Record(TrainerCallback):
    def __init__(self) -> None:
        self.path = log / f"rank-{os.environ['RANK']}.{os.getpid()}.jsonl"

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" not in logs:
            return
        assert isinstance(trainer.model, FSDPModule) == ("fsdp2" in options)
        line = {
            "step": state.global_step,
            "generation": generation,
            "rank": args.process_index,
            "samples": read.copy(),
            "loss": float(logs["loss"]).hex(),
            "rate": logs["learning_rate"],
            "world_size": args.world_size,
            "logged": [entry["step"] for entry in state.log_history if "loss" in entry],
        }
        read.clear()
        with self.path.open("a") as file:
            print(json.dumps(line), file=file)
        if not (log / "hurry").exists():
            time.sleep(options.get("pause_s", 0.0))


class StopEarly(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == options.get("stop_at")


class ProtectedTrainer(KeepstepMixin, Trainer):
    global_batch = options.get("global_batch", 16)
    attach_options: ClassVar = {"checkpoint": options.get("checkpoint")}


config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    attention_dropout=options["dropout"],
)
torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir=options.get("output", str(log / "output")),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=options["epochs"],
    learning_rate=1e-3,
    logging_steps=1,
    save_strategy="steps" if "save_steps" in options else "no",
    save_steps=options.get("save_steps", 500),
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    remove_unused_columns=False,
    ddp_find_unused_parameters=False,
    fsdp="fsdp2" in options,
    fsdp_config={
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        **options.get("fsdp2", {}),
    },
)
if "fsdp2" in options:
    shard_on_cpus()
trainer = ProtectedTrainer(
    model=LlamaForCausalLM(config),
    args=arguments,
    train_dataset=Tokens(),
    data_collator=collate,
    callbacks=[Record(), StopEarly()],
)
trainer.train(resume_from_checkpoint=options.get("resume_from_checkpoint"))
