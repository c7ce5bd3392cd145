"""Claims about garbage collections while a checkpoint is saved."""

import gc
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint.format.garbage import collections_put_off

PUT_OFF = {
    ("collective_plan.py", "plan_own_share"),
    ("collective_plan.py", "ask_for_pieces"),
    ("writer.py", "contents"),
}


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """The collector as Python starts it."""
    gc.enable()
    yield
    gc.enable()


def test_collector_is_off_meanwhile_and_on_again_afterwards() -> None:
    with collections_put_off():
        assert not gc.isenabled()
        with collections_put_off():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collector_is_on_again_after_an_error() -> None:
    with pytest.raises(OSError, match="no disk"), collections_put_off():
        raise OSError("no disk")
    assert gc.isenabled()


def test_collector_that_the_user_has_turned_off_stays_off() -> None:
    gc.disable()
    with collections_put_off():
        pass
    assert not gc.isenabled()


def test_planning_a_save_of_many_tensors_begins_no_collection(tmp_path: Path) -> None:
    """Without that there is one for every 700 objects, and sometimes one of all objects."""
    tensors = {f"layers.{number}": torch.full((4,), float(number)) for number in range(500)}
    begun: list[tuple[str, str]] = []

    def see(phase: str, information: dict[str, int]) -> None:
        frames = {(Path(frame.filename).name, frame.name) for frame in traceback.extract_stack()}
        begun.extend(frames & PUT_OFF)

    gc.callbacks.append(see)
    try:
        checkpoint.save(str(tmp_path), tensors, step=1)
    finally:
        gc.callbacks.remove(see)
    assert begun == []
