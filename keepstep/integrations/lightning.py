"""Attaches Lightning's Trainer to the job.

    from keepstep.integrations.lightning import KeepstepCallback, placement

    protection = KeepstepCallback()
    trainer = Trainer(**placement(), strategy="ddp", callbacks=[protection])
    trainer.fit(module, protection.loader(dataset, global_batch=64))

Every optimizer step is protected as `keepstep.attach` protects it, once Trainer has done all that
follows it: hooks, validation and, after an epoch's last step, the epoch's end. After a failure the
script runs from its first line, and `fit()` goes on after the newest step in memory, else in
`checkpoint`, else in `ckpt_path`.

Trainer's seams are those of the versions in `TRIED`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import lightning
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback
from lightning.pytorch.loops import _Loop
from torch.utils.data import DataLoader

from keepstep.elastic.data.datasets import Dataset
from keepstep.elastic.data.order import DataOrder
from keepstep.elastic.data.rank_batches import RankBatches
from keepstep.elastic.errors import UsageError
from keepstep.elastic.trainer.attach import attach
from keepstep.elastic.trainer.attached import Attached
from keepstep.integrations.extra_objects import joined_extra
from keepstep.integrations.versions import warn_if_untried

TRIED = ("2.6",)
"""Versions of lightning that were tried."""


def placement() -> dict[str, int]:
    """Return Trainer's `devices` and `num_nodes` as the job has them now; nothing without a job.

    Raises:
        UsageError: the nodes have different numbers of workers.
    """
    if "WORLD_SIZE" not in os.environ:
        return {}
    ranks = int(os.environ["WORLD_SIZE"])
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if ranks % devices:
        raise UsageError(
            f"Lightning needs as many workers on each node: {ranks} ranks, and {devices} on this "
            "node; give each agent the same --nproc-per-node"
        )
    return {"devices": devices, "num_nodes": ranks // devices}


class KeepstepCallback(Callback):  # type: ignore[misc]
    """Protects each optimizer step of one `Trainer.fit`.

    Args:
        options: arguments of `keepstep.attach`, such as `checkpoint` and `checkpoint_every`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._attached: Attached | None = None
        self._trainer: Any = None
        self._global_step = 0
        self._is_restored = False

    def loader(
        self,
        dataset: Dataset[Any],
        global_batch: int,
        *,
        shuffle: bool = True,
        **loader_options: Any,
    ) -> RankLoader:
        """Return a loader for training: this rank's share of each global batch.

        Its order is the same for any number of ranks, and it resumes after the newest step.

        Args:
            dataset: with an index.
            global_batch: samples of a batch over all ranks; of a step, with
                `accumulate_grad_batches`, as many times that.
            shuffle: permute each epoch, by the option `seed`.
            loader_options: arguments of torch's DataLoader, such as `num_workers`.

        Raises:
            UsageError: the batch is larger than the dataset.
        """
        order = DataOrder(
            len(dataset), global_batch, seed=int(self._options.get("seed", 0)), shuffle=shuffle
        )
        return RankLoader(dataset, order, lambda: self._trainer, loader_options)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the objects that Trainer has made, and restore them."""
        warn_if_untried("lightning", lightning.__version__, TRIED)
        connector = trainer._checkpoint_connector
        # Of `ckpt_path`. What keepstep restores replaces it.
        connector.restore_training_state()
        connector._loaded_checkpoint = {}
        self._trainer = trainer
        options = dict(self._options)
        own = {
            "lightning": _Progress(self, trainer),
            "precision": trainer.precision_plugin,
        }
        extra = joined_extra(own, options.pop("extra", None))
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        attached = attach(
            trainer.strategy.model, trainer.optimizers, schedulers, extra=extra, **options
        )
        attached.restore(step=trainer.global_step)
        fit_loop = trainer.fit_loop
        if attached.source != "memory":
            # A job that begins after an early stop was started to go on.
            trainer.should_stop = False
        # Made for `estimated_stepping_batches`, it has not got its stored position.
        fit_loop._combined_loader = None
        if self._is_restored:
            trainer.num_sanity_val_steps = 0
            connector._ckpt_path = None
        if attached.is_managed:
            # The agent answers signals. Lightning's handler begins a collective of its own.
            trainer._signal_connector.register_signal_handlers = lambda: None
        self._global_step = trainer.global_step
        epoch_loop = fit_loop.epoch_loop
        epoch_loop.on_advance_end = partial(self._end_batch, epoch_loop.on_advance_end)
        fit_loop.on_advance_end = partial(self._end_epoch, fit_loop.on_advance_end)
        self._attached = attached

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse a checkpoint that Lightning has read over what keepstep has restored."""
        if trainer.strategy.restore_checkpoint_after_setup and trainer.ckpt_path:
            raise UsageError(
                f"{type(trainer.strategy).__name__} reads ckpt_path={str(trainer.ckpt_path)!r} "
                "after keepstep has restored the state: leave it out, and begin from a checkpoint "
                "that `keepstep convert` has made by KeepstepCallback(start_from=...)"
            )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin an epoch with the random numbers that the one before has left."""
        if self._attached is not None:
            self._attached.restore_generators()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Resume within an epoch with the random numbers that the last step has left."""
        if self._attached is not None:
            self._attached.restore_generators()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait until the last step is safe."""
        if self._attached is not None:
            self._attached.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the process if the loss of another one has caused the error."""
        if self._attached is not None:
            self._attached.end_if_lost(exception)

    def _end_batch(self, inherited: Callable[[Any], None], fetcher: Any) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        if self._is_restored and loop._skip_next_val:
            # Lightning passes once without a batch if the restored step has been validated.
            loop._skip_next_val = False
            return
        inherited(fetcher)
        if not loop.done:
            self._protect_step()

    def _end_epoch(self, inherited: Callable[[], None]) -> None:
        inherited()
        self._protect_step()

    def _protect_step(self) -> None:
        # Else Lightning leaves out some schedulers until the epoch's end.
        self._trainer.fit_loop._restarting = False
        if self._attached is not None and self._trainer.global_step != self._global_step:
            # Several optimizers move it by more than one.
            self._global_step = self._trainer.global_step
            self._attached.step_done()
            self._attached.end_if_over()


class RankLoader:
    """Yields this rank's share of each global batch of an epoch, from Trainer's position on.

    Not one of torch's DataLoaders, to which Lightning would give a sampler.

    Args:
        dataset: with an index.
        order: of its samples.
        trainer: returns the Trainer that reads.
        options: arguments of torch's DataLoader.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        order: DataOrder,
        trainer: Callable[[], Any],
        options: Mapping[str, Any],
    ) -> None:
        self.dataset = dataset
        self._order = order
        self._trainer = trainer
        # It draws the seeds of loader processes, and not from what is training state.
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(
            dataset,  # type: ignore[arg-type]
            batch_sampler=RankBatches(order, self._first, self._share),
            generator=self._generator,
            **options,
        )

    @property
    def loss_scale(self) -> float:
        """Factor for this rank's mean loss that keeps the average over ranks exact."""
        return self._order.loss_scale(*self._share())

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self._order.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the epoch that Trainer is in, after those that it has read."""
        # Trainer iterates before it has found its place, and asks for a batch afterwards.
        self._generator.manual_seed(self._order.seed + self._first())
        yield from self._loader

    def state_dict(self) -> dict[str, int]:
        """Return what the position within an epoch depends on; Trainer stores the position."""
        return {"samples": self._order.samples, "global_batch": self._order.global_batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Refuse a position in other batches.

        Raises:
            UsageError: the dataset's length, or `global_batch`, differs.
        """
        if state != self.state_dict():
            raise UsageError(
                f"the epoch began with {state['samples']} samples in batches of "
                f"{state['global_batch']}, and this loader has {self._order.samples} in batches "
                f"of {self._order.global_batch}: change them between two epochs"
            )

    def _first(self) -> int:
        """Return the number, since training began, of the batch that Trainer reads next."""
        loop = self._trainer().fit_loop
        epoch = int(loop.epoch_progress.current.processed)
        return epoch * len(self) + int(loop.epoch_loop.batch_progress.current.ready)

    def _share(self) -> tuple[int, int]:
        """Return the data-parallel rank, and the number of them."""
        share = self._trainer().distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        return share["rank"], share["num_replicas"]


class _Progress:
    """Trainer's loops, its callbacks' states and its data module's."""

    def __init__(self, callback: KeepstepCallback, trainer: Any) -> None:
        self._callback = callback
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        trainer = self._trainer
        callbacks = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
        state = {
            "fit_loop": trainer.fit_loop.state_dict(),
            "should_stop": trainer.should_stop,
            "callbacks": {key: state for key, state in callbacks.items() if state},
            "data": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
        }
        return move_data_to_device(state, torch.device("cpu"))  # type: ignore[no-any-return]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore Trainer's state in place."""
        trainer = self._trainer
        loop = trainer.fit_loop
        loop.load_state_dict(state["fit_loop"])
        epochs = loop.epoch_progress.total
        if epochs.completed == epochs.ready:
            # Lightning would finish the epoch again if `max_steps` is given.
            _Loop.restarting.fset(loop, False)
        trainer.should_stop = state["should_stop"]
        for callback in trainer.callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])
        if state["data"] and trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state["data"])
        self._callback._is_restored = True
