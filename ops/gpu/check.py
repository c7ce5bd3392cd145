"""Defines what a check is, and what it finds.

A check is a function of the machine. It states claims, each with whether it held, and figures that
nobody has to agree with. A module's docstring says what its check proves, and what a pass is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Figures = Mapping[str, Any]
"""The measured figures, by name; values that JSON can hold."""


class Result(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


class NotRun(Exception):
    """The machine lacks something that the check needs; the message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check, and where its code is.

    Args:
        id: its number; G: one GPU is enough, N: several are needed.
        shows: what it shows, in a line.
        module: the module with its code; empty if no command on one machine can show it.
        function: the function, which takes a Machine and returns a Finding.
        gpus: the number of GPUs that it needs.
        limit_s: after this time it is killed, with its descendants.
        recorder: whether it needs keepstep's recorder, which takes half a minute to build.
        unavailable: why it cannot be run, where `module` is empty.
    """

    id: str
    shows: str
    module: str
    function: str = "check"
    gpus: int = 1
    limit_s: float = 58.0
    recorder: bool = False
    unavailable: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. It passes if every claim holds.

    Args:
        claims: each claim in words, and whether it held.
        figures: the measured figures.
    """

    claims: Mapping[str, bool]
    figures: Figures = field(default_factory=dict)

    @property
    def broken(self) -> list[str]:
        """The claims that did not hold."""
        return [claim for claim, holds in self.claims.items() if not holds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a check, as it is reported.

    Args:
        id, shows: of the check.
        result: how it ended.
        why: why it failed or was not run; else empty.
        seconds: how long it took.
        claims, figures: of its finding, if there is one.
        output: the end of what its processes printed, if it failed.
    """

    id: str
    shows: str
    result: Result
    why: str = ""
    seconds: float = 0.0
    claims: Mapping[str, bool] = field(default_factory=dict)
    figures: Figures = field(default_factory=dict)
    output: str = ""
