"""Claims about what frames of a handled exception keep."""

import gc
import weakref

from keepstep.elastic.trainer.generation_state import forget_locals


class State:
    """Something large."""


def test_state_of_frames_that_an_exception_and_its_causes_have_left_is_freed() -> None:
    states: list[weakref.ref[State]] = []

    def compute() -> None:
        state = State()
        states.append(weakref.ref(state))
        raise RuntimeError("lost")

    def step() -> None:
        state = State()
        states.append(weakref.ref(state))
        try:
            compute()
        except RuntimeError as lost:
            raise ValueError("failed") from lost

    own = State()
    try:
        step()
    except ValueError as error:
        assert all(state() is not None for state in states)
        forget_locals(error)
        gc.collect()
        assert [state() for state in states] == [None, None]
    assert isinstance(own, State)
