"""Records the phases of a step in a loop that was not written for it.

| phase | begins | ends |
|---|---|---|
| data wait | the main thread requests a batch from a `DataLoader`'s iterator | it returns |
| forward | first call of a module after an optimizer step, batch or backward pass | next phase |
| evaluation | a module is called without gradients, and after each of its batches | next phase |
| backward | `torch.autograd.backward` is called, also by `Tensor.backward` | it returns |
| optimizer | any optimizer's pre-step hook | its post-step hook |
| checkpoint | the main thread calls `torch.save` | it returns |
| garbage collection | a collection of the oldest generation, or of a millisecond | it ends |

So the loss is part of forward, and metrics are part of evaluation. Times are the host's: work that
a device still has to do when a call returns is not included. PyTorch's public hooks are used where
they exist; `DataLoader`, `torch.autograd.backward` and `torch.save` have none and are wrapped. A
hook on all modules slows down each of them, so the hook removes itself when it has fired. In an
evaluation it is registered again when the called module has returned: each call shows that the rank
makes progress, and other ranks may be waiting for it.
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
from torch.utils.hooks import RemovableHandle

from keepstep.monitor.records import Phase
from keepstep.monitor.telemetry.recorder import Recorder
from keepstep.torch_internals import data_loader_iterator

_SHORT_COLLECTION_S = 1e-3
# Calls within this time are one record, so that a model that generates token by token does not
# overwrite the ring.
_HEARTBEAT_S = 0.25
_OLDEST_GENERATION = 2
_NONE = -1


class AutomaticPhases:
    """Installs the hooks; `remove` removes them."""

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
        # Phases inside other phases are not recorded: a DataLoader that reads another one, or a
        # backward pass that calls one.
        self._depth = 0
        self._handles = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        self._wrapped: list[tuple[Any, str, Any, Any]] = []
        self._wrap(torch.autograd, "backward", Phase.BACKWARD)
        self._wrap(data_loader_iterator(), "__next__", Phase.DATA_WAIT)
        self._wrap(torch, "save", Phase.CHECKPOINT)
        gc.callbacks.append(self._on_collection)
        self._arm()

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._disarm()
        self._remove_return_hook()
        for owner, name, original, wrapper in self._wrapped:
            # A wrapper that was wrapped again later remains, and only calls the original.
            if getattr(owner, name) is wrapper:
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
            # While this runs the loop calls no module; calls that recompute activations are not a
            # forward pass.
            self._disarm()
            self._depth += 1
            position = self._recorder.begin(phase)
            try:
                return original(*args, **kwargs)
            finally:
                self._recorder.end(position)
                self._depth -= 1
                if evaluates:
                    # Also after the last batch: computing the metrics may take long, and other
                    # ranks wait for it.
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
            self._remove_return_hook()
            if self._depth == 0:
                self._arm()

    def _remove_return_hook(self) -> None:
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
