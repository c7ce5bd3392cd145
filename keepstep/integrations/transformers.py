"""Attaches Hugging Face's Trainer, and what derives from it, to the job.

    from keepstep.integrations.transformers import KeepstepMixin

    class MyTrainer(KeepstepMixin, Trainer):
        pass

Every optimizer step is protected as `keepstep.attach` protects it. After a failure the script runs
from its first line, and `train()` goes on after the newest step in memory, else in `checkpoint`,
else in the folder of `resume_from_checkpoint`. Trainer's own state, its callbacks' states and its
logs are restored with it.

Trainer's seams are those of the versions in `TRIED`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer
from transformers.trainer_callback import ExportableState

from keepstep.elastic.data.order import DataOrder
from keepstep.elastic.data.rank_batches import RankBatches
from keepstep.elastic.errors import UsageError
from keepstep.elastic.trainer.attach import attach
from keepstep.elastic.trainer.attached import Attached
from keepstep.integrations.extra_objects import joined_extra
from keepstep.integrations.versions import warn_if_untried

TRIED = ("5.23",)
"""Versions of transformers that were tried."""

_MEMORY = "keepstep"
"""Stands for the checkpoint's folder in Trainer's loop where the state came from keepstep."""
_NOT_STORED = ("stateful_callbacks", "is_local_process_zero", "is_world_process_zero")


class KeepstepMixin:
    """The first base of a Trainer's class.

    Attributes:
        global_batch: samples of an optimizer step over all ranks. The order of samples is then the
            same for any number of ranks, and the job may change its number of ranks. None: that of
            `per_device_train_batch_size`; a job that resumes with another number of ranks is
            refused.
        attach_options: arguments of `keepstep.attach`, such as `checkpoint` and `checkpoint_every`.
    """

    global_batch: ClassVar[int | None] = None
    attach_options: ClassVar[Mapping[str, Any]] = {}

    # Of Trainer, which is the next base.
    accelerator: Any
    args: Any
    callback_handler: Any
    control: Any
    lr_scheduler: Any
    model: Any
    optimizer: Any
    state: Any
    train_dataset: Any
    get_total_train_batch_size: Any
    _attached: Attached | None = None
    _batches: Mapping[str, int]
    _progress: _Progress
    _updates_per_epoch: int
    _resumed: bool = False

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        bases = cls.__mro__
        if Trainer in bases and bases.index(Trainer) < bases.index(KeepstepMixin):
            raise UsageError(
                f"{cls.__name__} has KeepstepMixin behind Trainer, whose methods then protect "
                f"nothing: write class {cls.__name__}(KeepstepMixin, ...)"
            )

    def get_train_dataloader(self) -> Any:
        """Return a loader of this rank's samples, in an order that the number of ranks leaves."""
        inherited: Any = super()
        if isinstance(self.train_dataset, IterableDataset):
            raise UsageError(
                "KeepstepMixin reads datasets that have an index: an IterableDataset has no "
                "position that it could restore"
            )
        for name in ("get_train_dataloader", "_get_train_sampler"):
            if getattr(inherited, name).__func__ is not getattr(Trainer, name):
                raise UsageError(
                    f"KeepstepMixin has an order of its own, and the trainer of "
                    f"{type(self).__name__} another one, by its {name}(), as TRL's GRPOTrainer "
                    "has: such trainers are not supported"
                )
        args = self.args
        if args.train_sampling_strategy != "random":
            raise UsageError(
                f"KeepstepMixin has an order of its own, and train_sampling_strategy="
                f"{args.train_sampling_strategy!r} another one: leave it at 'random'"
            )
        accumulated = args.gradient_accumulation_steps
        ranks = args.world_size
        own_batch = self.get_total_train_batch_size(args)
        if own_batch != args.train_batch_size * ranks * accumulated:
            raise UsageError(
                "KeepstepMixin gives each rank samples of its own, and some of these ranks compute "
                "the same ones: leave out tensor, context and sequence parallelism"
            )
        step_batch = self.global_batch or own_batch
        if step_batch % accumulated:
            raise UsageError(
                f"global_batch={step_batch} is no multiple of gradient_accumulation_steps="
                f"{accumulated}"
            )
        own: DataLoader[Any] = inherited.get_train_dataloader()
        dataset: Any = own.dataset
        seed = args.seed if args.data_seed is None else args.data_seed
        order = DataOrder(len(dataset), step_batch // accumulated, seed=seed)
        self._batches = {"samples_per_step": step_batch, "samples": len(dataset)}
        return DataLoader(
            dataset,
            batch_sampler=_EpochBatches(order, args.process_index, ranks),
            collate_fn=own.collate_fn,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            in_order=args.dataloader_in_order,
            worker_init_fn=own.worker_init_fn,
            # Trainer's order does not draw from the generators that are training state.
            generator=torch.Generator().manual_seed(args.seed),
        )

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, *rest: Any
    ) -> tuple[int, int]:
        inherited: Any = super()
        begun = inherited._init_training_state(max_steps, num_update_steps_per_epoch, *rest)
        self._updates_per_epoch = num_update_steps_per_epoch
        self._resumed = False
        return begun  # type: ignore[no-any-return]

    def _prepare_for_training(self, *arguments: Any) -> Any:
        inherited: Any = super()
        prepared = inherited._prepare_for_training(*arguments)
        warn_if_untried("transformers", transformers.__version__, TRIED)
        self._progress = _Progress(self)
        extra: dict[str, Any] = {"transformers": self._progress, "loss": _LoggedLoss(self)}
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None:
            extra["scaler"] = scaler
        options = dict(self.attach_options)
        if "start_from" in options:
            raise UsageError("give Trainer a model that has the values, and no start_from")
        extra = joined_extra(extra, options.pop("extra", None))
        # Before the objects are read: Trainer makes it after this.
        self._tr_loss = torch.tensor(0.0, device=self.args.device)
        self._total_loss_scalar = 0.0
        self._globalstep_last_logged = 0
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        scheduler = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        self._attached = attach(self.model, optimizer, scheduler, extra=extra, **options)
        self._attached.restore(step=self.state.global_step)
        self._resumed = self._attached.source != "start"
        return prepared

    def _run_epoch(self, **loop: Any) -> None:
        inherited: Any = super()
        if self._resumed:
            if loop["epoch"] == loop["epochs_trained"]:
                # Trainer has reset them since they were restored.
                self._progress.restore_losses()
            done, steps = divmod(self.state.global_step, self._updates_per_epoch)
            if loop["epoch"] < done:
                return
            loop |= {
                "resume_from_checkpoint": _MEMORY,
                "epochs_trained": done,
                "steps_trained_in_current_epoch": steps * self.args.gradient_accumulation_steps,
            }
            self._resumed = False
        inherited._run_epoch(**loop)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Leave the generators as they are where keepstep has restored them."""
        inherited: Any = super()
        if checkpoint != _MEMORY:
            inherited._load_rng_state(checkpoint)

    def _maybe_log_save_evaluate(self, *arguments: Any, **named: Any) -> None:
        """Protect the step once Trainer has logged, evaluated and saved it."""
        inherited: Any = super()
        inherited._maybe_log_save_evaluate(*arguments, **named)
        attached = self._attached
        if attached is not None and self.state.global_step > attached.steps:
            attached.step_done()
            # Before Trainer changes its state for the next step.
            attached.end_if_over()

    def _finalize_training(self, *arguments: Any) -> Any:
        """Wait until the last step is safe, before Trainer loads its best model."""
        inherited: Any = super()
        if self._attached is not None:
            self._attached.finish()
        return inherited._finalize_training(*arguments)


class _EpochBatches(RankBatches):
    """This rank's indices of each batch of an epoch; Trainer skips those that are done."""

    def __init__(self, order: DataOrder, rank: int, world_size: int) -> None:
        order.loss_scale(rank, world_size)
        super().__init__(order, self._first_of_epoch, lambda: (rank, world_size))
        self._chosen = 0
        # Of an inner sampler, as Trainer looks for it.
        self.batch_sampler = self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._chosen = epoch

    def _first_of_epoch(self) -> int:
        return self._chosen * len(self)


class _Progress:
    """Trainer's state, its callbacks' and its control's, as JSON."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._losses: Mapping[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        trainer = self._trainer
        state = dataclasses.asdict(trainer.state)
        return {
            "state": {key: value for key, value in state.items() if key not in _NOT_STORED},
            "callbacks": [[name, callback.state()] for name, callback in self._exportable()],
            "flos": float(trainer.current_flos),
            "losses": {
                "_total_loss_scalar": float(trainer._total_loss_scalar),
                "_globalstep_last_logged": trainer._globalstep_last_logged,
            },
            "batches": dict(trainer._batches),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore Trainer's state in place.

        Raises:
            UsageError: the samples are others than before, or Trainer has other callbacks.
        """
        trainer = self._trainer
        stored, own = state["batches"], trainer._batches
        if stored != own:
            raise UsageError(
                f"a step had {stored['samples_per_step']} of {stored['samples']} samples, and has "
                f"{own['samples_per_step']} of {own['samples']} now, so that its position means "
                "others: give the same dataset, and the Trainer's class "
                f"global_batch = {stored['samples_per_step']}, which holds for any number of ranks"
            )
        exportable = self._exportable()
        names, stored_names = [n for n, _ in exportable], [n for n, _ in state["callbacks"]]
        if names != stored_names:
            raise UsageError(
                f"callbacks with a state were {stored_names}, and are {names}: give Trainer the "
                "same ones"
            )
        for name, value in state["state"].items():
            setattr(trainer.state, name, value)
        trainer.current_flos = state["flos"]
        self._losses = state["losses"]
        for (_, callback), (_, exported) in zip(exportable, state["callbacks"], strict=True):
            for name, value in exported.get("attributes", {}).items():
                setattr(callback, name, value)

    def restore_losses(self) -> None:
        """Restore what Trainer counts between two logs, after it has reset it."""
        trainer = self._trainer
        for name, value in self._losses.items():
            setattr(trainer, name, value)

    def _exportable(self) -> list[tuple[str, Any]]:
        trainer = self._trainer
        everything = [*trainer.callback_handler.callbacks, trainer.control]
        return [(type(it).__name__, it) for it in everything if isinstance(it, ExportableState)]


class _LoggedLoss:
    """The loss since the last log, which Trainer keeps on the device."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"sum": self._trainer._tr_loss.detach().reshape(1)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Keep the loss until Trainer has reset its own."""
        progress = self._trainer._progress
        progress._losses = {**progress._losses, "_tr_loss": state["sum"].clone().reshape(())}
