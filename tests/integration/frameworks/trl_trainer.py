"""Trains a small Llama by a trainer of TRL, and records each step's samples and loss."""

import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from keepstep.integrations.transformers import KeepstepMixin

options = json.loads(sys.argv[1])
log = Path(options["log"])
generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
read: list[int] = []
SAMPLES = 64


class Record(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" not in logs:
            return
        line = {
            "step": state.global_step,
            "generation": generation,
            "rank": args.process_index,
            "samples": read.copy(),
            "loss": float(logs["loss"]).hex(),
            "world_size": args.world_size,
        }
        read.clear()
        with (log / f"rank-{os.environ['RANK']}.{os.getpid()}.jsonl").open("a") as file:
            print(json.dumps(line), file=file)
        if not (log / "hurry").exists():
            time.sleep(options.get("pause_s", 0.0))


class ProtectedSFT(KeepstepMixin, SFTTrainer):
    global_batch = 16


class ProtectedDPO(KeepstepMixin, DPOTrainer):
    global_batch = 16


def recording(collate: Any) -> Any:
    """Return a collator that notes the samples: the first token of each is its number."""

    def noting(samples: list[dict[str, Any]]) -> Any:
        read.extend(int(sample.get("input_ids", sample.get("prompt_ids"))[0]) for sample in samples)
        return collate(samples)

    return noting


def dataset(columns: dict[str, Any]) -> Dataset:
    # Without a name, it would be pickled for one, which some versions of its packages cannot.
    return Dataset(InMemoryTable.from_pydict(columns), fingerprint=options["trainer"])


def words(index: int, count: int) -> str:
    drawn = torch.randint(0, SAMPLES, (count,), generator=torch.Generator().manual_seed(index))
    return " ".join(f"w{number}" for number in drawn.tolist())


vocabulary = {f"w{number}": number for number in range(SAMPLES)} | {"<pad>": 64, "<eos>": 65}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
torch.manual_seed(0)
common: dict[str, Any] = {
    "model": LlamaForCausalLM(
        LlamaConfig(
            vocab_size=66,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    ),
    "processing_class": PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ),
    "callbacks": [Record()],
}
arguments: dict[str, Any] = {
    "output_dir": str(log / "output"),
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": options["epochs"],
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "ddp_find_unused_parameters": False,
}
if options["trainer"] == "sft":
    tokens = [[index, *(int(word[1:]) for word in words(index, 11).split())] for index in range(64)]
    trainer: Any = ProtectedSFT(
        args=SFTConfig(**arguments, max_length=16),
        train_dataset=dataset({"input_ids": tokens}),
        **common,
    )
else:
    pairs = {
        "prompt": [f"w{index} {words(index, 3)}" for index in range(SAMPLES)],
        "chosen": [f" {words(index + 100, 6)}" for index in range(SAMPLES)],
        "rejected": [f" {words(index + 200, 6)}" for index in range(SAMPLES)],
    }
    trainer = ProtectedDPO(
        args=DPOConfig(**arguments),
        ref_model=copy.deepcopy(common["model"]),
        train_dataset=dataset(pairs),
        **common,
    )
trainer.data_collator = recording(trainer.data_collator)
trainer.train()
