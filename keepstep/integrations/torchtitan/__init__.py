"""Attaches torchtitan's Trainer to the job, by a checkpoint manager and a data loader.

    keepstep run -m torchtitan.train --module keepstep.integrations.torchtitan \\
        --config llama3_debugmodel --dataloader.dataset_path tokens.npy

Every step is protected as `keepstep.attach` protects it. After a failure torchtitan's `main` runs
from its first line, and `Trainer.train` goes on after the newest step in memory, else in
`checkpoint.folder`. `protected` makes such a config of another one.
"""

from keepstep.integrations.torchtitan.checkpointer import KeepstepCheckpointManager
from keepstep.integrations.torchtitan.config_registry import protected
from keepstep.integrations.torchtitan.dataloader import KeepstepDataLoader

__all__ = ["KeepstepCheckpointManager", "KeepstepDataLoader", "protected"]
