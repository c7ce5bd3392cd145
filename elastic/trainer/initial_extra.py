"""Remembers what a script's own objects were before training, for the generations that follow."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.tensor import DTensor

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.elastic.data.json_values import from_json_value, to_json_value
from keepstep.elastic.errors import UsageError
from keepstep.elastic.trainer.state import Stateful


class InitialExtra:
    """The states of extra objects as this process made them.

    An object that `build` makes is new in each generation. One that the script made before keeps
    what training has changed, while a process that is new has it as it was. So it is set back
    before a generation's state is restored, and stays so where there is nothing to resume from.
    """

    def __init__(self) -> None:
        self._states: dict[str, tuple[Stateful, Json]] | None = None

    def note(self, extra: Mapping[str, Stateful]) -> None:
        """Remember the objects' states; called before each generation, the first call counts."""
        if self._states is not None:
            return
        self._states = {}
        for key, value in extra.items():
            state = value.state_dict()
            parts = state.values() if isinstance(state, Mapping) else ()
            if any(isinstance(part, DTensor) for part in parts):
                continue  # It belongs to a generation's mesh, and so does what has it.
            try:
                self._states[key] = value, to_json_value(f"extra {key!r}", state)
            except UsageError:
                continue  # Large tensors, or on a device: not worth a copy for the whole job.

    def restore(self, extra: Mapping[str, Stateful]) -> None:
        """Set the objects that are still the same ones to the states remembered."""
        for key, (value, state) in (self._states or {}).items():
            if extra.get(key) is value:
                value.load_state_dict(from_json_value(state, value.state_dict()))
