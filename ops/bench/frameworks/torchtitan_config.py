"""Has a config of torchtitan, which resumes from its newest checkpoint."""

from typing import Any

from torchtitan.components.checkpointer import CheckpointManager

from ops.bench.frameworks.plan import SAVE_EVERY
from ops.bench.frameworks.torchtitan_workload import Loader, small_llama


def bench() -> Any:
    config = small_llama()
    config.dataloader = Loader.Config()
    config.checkpoint = CheckpointManager.Config(
        enable=True, interval=SAVE_EVERY, last_save_model_only=False
    )
    return config
