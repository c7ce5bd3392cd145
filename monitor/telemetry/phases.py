"""Marks the phases of a step in a loop that knows nothing of it.

| phase | begins | ends |
|---|---|---|
| data wait | the main thread asks a `DataLoader`'s iterator for a batch | it has it |
| forward | the first module is called after an optimizer step, a batch or a backward pass | another phase begins; so the loss is in it |
| evaluation | a module is called while gradients are off, and after each of its batches | another phase begins; so metrics are in it |
| backward | `torch.autograd.backward` is called, which `Tensor.backward` and pipelines do | it returns |
| optimizer | any optimizer's pre-step hook | its post-step hook |
| checkpoint | the main thread calls `torch.save` | it returns |
| garbage collection | a collection of the oldest generation, or any that took a millisecond | it is over |

These are times of the host: what a device still has to do when a call returns, is not in them. Only PyTorch's public hooks are used where
there are any; `DataLoader`, `torch.autograd.backward` and `torch.save` offer none, and are wrapped. The hook on modules costs nothing
between its uses: it takes itself away when it has fired, because a hook on all modules slows down each of them. In an evaluation it
comes back when the module called has returned: each call is a sign of life of a rank that others may wait for.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import dataloader
from torch.utils.hooks import RemovableHandle

from keepstep.monitor.records import Phase
from keepstep.monitor.telemetry.recorder import Recorder

_SHORT_COLLECTION_S = 1e-3
# Calls of a model that generates token by token are one record until then, so that they do not flush out the ring.
_HEARTBEAT_S = 0.25
_OLDEST_GENERATION = 2
_NONE = -1


class AutomaticPhases:
    """The hooks in place. `remove` takes them away."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._thread = threading.get_ident()
        self._forward = _NONE
        self._evaluation = _NONE
        self._evaluation_began_s = 0.0
        self._optimizer = _NONE
        self._collection = _NONE
        self._collection_began_s = 0.0
        self._armed: RemovableHandle | None = None
        self._returned: RemovableHandle | None = None
        # Phases inside others are theirs: a DataLoader that reads another, a backward pass that calls one.
        self._depth = 0
        self._handles = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        self._wrapped: list[tuple[Any, str, Any, Any]] = []
        self._wrap(torch.autograd, "backward", Phase.BACKWARD)
        self._wrap(dataloader._BaseDataLoaderIter, "__next__", Phase.DATA_WAIT)
        self._wrap(torch, "save", Phase.CHECKPOINT)
        gc.callbacks.append(self._on_collection)
        self._arm()

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._disarm()
        self._await_no_return()
        for owner, name, original, ours in self._wrapped:
            # Whoever has wrapped it after us holds ours; then it stays, and does nothing but call on.
            if getattr(owner, name) is ours:
                setattr(owner, name, original)
        self._thread = 0
        gc.callbacks.remove(self._on_collection)

    def _wrap(self, owner: Any, name: str, phase: Phase) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._depth or threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            evaluates = self._evaluation != _NONE and phase == Phase.DATA_WAIT
            self._end_forward()
            self._end_evaluation()
            # No module is called by the loop while this runs; those that recompute activations are not a forward pass.
            self._disarm()
            self._depth += 1
            position = self._recorder.begin(phase)
            try:
                return original(*args, **kwargs)
            finally:
                self._recorder.end(position)
                self._depth -= 1
                if evaluates:
                    # Also after the last batch: what is made of them all may take long, and the others wait for it.
                    self._begin_evaluation()
                self._arm()

        setattr(owner, name, wrapper)
        self._wrapped.append((owner, name, original, wrapper))

    def _arm(self) -> None:
        if self._armed is None:
            self._armed = torch.nn.modules.module.register_module_forward_pre_hook(
                self._before_module
            )

    def _disarm(self) -> None:
        if self._armed is not None:
            self._armed.remove()
            self._armed = None

    def _before_module(self, module: torch.nn.Module, inputs: object) -> None:
        if threading.get_ident() == self._thread and self._depth == 0:
            self._disarm()
            if torch.is_grad_enabled():
                self._end_evaluation()
                self._forward = self._recorder.begin(Phase.FORWARD)
                return
            if time.monotonic() - self._evaluation_began_s >= _HEARTBEAT_S:
                self._end_evaluation()
            self._begin_evaluation()
            self._returned = module.register_forward_hook(self._after_evaluated, always_call=True)

    def _after_evaluated(self, *_: object) -> None:
        if threading.get_ident() == self._thread:
            self._await_no_return()
            if self._depth == 0:
                self._arm()

    def _await_no_return(self) -> None:
        if self._returned is not None:
            self._returned.remove()
            self._returned = None

    def _begin_evaluation(self) -> None:
        if self._evaluation == _NONE:
            self._evaluation_began_s = time.monotonic()
            self._evaluation = self._recorder.begin(Phase.EVALUATION)

    def _end_evaluation(self) -> None:
        if self._evaluation != _NONE:
            self._recorder.end(self._evaluation)
            self._evaluation = _NONE

    def _end_forward(self) -> None:
        if self._forward != _NONE:
            self._recorder.end(self._forward)
            self._forward = _NONE

    def _before_optimizer(self, *_: object) -> None:
        if self._depth == 0:
            self._end_forward()
            self._end_evaluation()
        self._optimizer = self._recorder.begin(Phase.OPTIMIZER)

    def _after_optimizer(self, *_: object) -> None:
        self._recorder.end(self._optimizer)
        self._recorder.optimizer_stepped()
        if self._depth == 0:
            self._arm()

    def _on_collection(self, stage: str, about: dict[str, int]) -> None:
        is_long = about["generation"] == _OLDEST_GENERATION
        if stage == "start":
            self._collection_began_s = time.monotonic()
            if is_long:
                self._collection = self._recorder.begin(Phase.GARBAGE_COLLECTION)
        elif is_long:
            if self._collection != _NONE:
                self._recorder.end(self._collection)
                self._collection = _NONE
        elif (now_s := time.monotonic()) - self._collection_began_s >= _SHORT_COLLECTION_S:
            self._recorder.record_phase(Phase.GARBAGE_COLLECTION, self._collection_began_s, now_s)
