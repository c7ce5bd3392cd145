"""Claims about values of other tools' files in messages: short, and at once, whatever they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from keepstep.checkpoint.convert.read.safe_repr import safe_repr
from keepstep.checkpoint.errors import CheckpointError
from tests.opened_checkpoints import open_foreign


def bomb(levels: int = 60) -> tuple[object, ...]:
    """Return a tuple of which each level has the one below it twice."""
    value: tuple[object, ...] = ()
    for _ in range(levels):
        value = (value, value)
    return value


class Shaped:
    """Pickled as a tensor of a shape that is none."""

    def __init__(self, shape: object) -> None:
        self._shape = shape

    def __reduce__(self) -> tuple[object, ...]:
        storage = torch.ones(2).__reduce_ex__(2)[1][0]
        return (torch._utils._rebuild_tensor_v2, (storage, 0, self._shape, (1,), False, {}))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((3, -1), "(3, -1)"),
        ("ab", "'ab'"),
        (None, "None"),
        (True, "True"),
        (1.5, "1.5"),
        (10**5000, "a huge number"),
        ([10**5000], "[a huge number]"),
        (Path("a"), "a PosixPath"),
    ],
    ids=range(8),
)
def test_what_is_short_is_shown_as_it_is(value: object, expected: str) -> None:
    assert safe_repr(value) == expected


def test_what_is_nested_or_long_is_cut() -> None:
    assert len(safe_repr(bomb())) < 200
    assert len(safe_repr("a" * 10**6)) < 200
    assert len(safe_repr({str(number): bomb() for number in range(1000)})) < 1000


def test_a_shape_of_tuples_in_tuples_is_refused_at_once(tmp_path: Path) -> None:
    whole = tmp_path / "a.pt"
    torch.save({"w": Shaped(bomb())}, whole)
    assert whole.stat().st_size < 5000
    with pytest.raises(CheckpointError, match="no tensor has shape"):
        open_foreign(str(whole))
