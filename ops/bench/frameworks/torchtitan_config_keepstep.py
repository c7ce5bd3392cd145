"""Has a config of torchtitan, which resumes from its newest checkpoint."""

from typing import Any

from torchtitan.components.checkpointer import CheckpointManager

from keepstep.integrations.torchtitan import protected
from ops.bench.frameworks.plan import SAVE_EVERY
from ops.bench.frameworks.torchtitan_workload import Rows, small_llama


def bench() -> Any:
    config = small_llama()
    config.checkpoint = CheckpointManager.Config(
        enable=True, interval=SAVE_EVERY, last_save_model_only=False
    )
    return protected(config, lambda tokenizer, length: Rows())
