"""Claims about the arguments of `join`, which are checked before the job is asked for anything."""

from __future__ import annotations

from typing import Any

import pytest

import keepstep
from keepstep.elastic.errors import UsageError


def build(world: keepstep.World) -> keepstep.State:
    raise AssertionError("nothing is built from arguments that are refused")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"checkpoint_compression": "gzip"}, "checkpoint_compression='gzip': give 'zstd', or None"),
        ({"checkpoint_every": 5}, "checkpoint_every needs checkpoint=URL"),
        ({"keep_last": 3}, "keep_last needs checkpoint=URL"),
        ({"keep_last": 0, "checkpoint": "/c"}, "keep_last=0: give a number, at least 1"),
        ({"keep_last": True, "checkpoint": "/c"}, "keep_last=True: give a number"),
        ({"keep_every": 1.5, "checkpoint": "/c"}, "keep_every=1.5: give a number"),
        ({"keep_every": 100, "checkpoint": "/c"}, "give keep_last, too"),
        ({"seed": 2**64}, r"seed=18446744073709551616: give a number from -2\*\*63 to 2\*\*64 - 1"),
        ({"seed": -(2**63) - 1}, "seed=-9223372036854775809: give a number"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_refused_with_the_choices(
    arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        keepstep.join(build, **arguments)
