"""Opens what a conversion reads: a checkpoint in the universal format, or in another tool's.

The universal format is told by its manifests; another tool's by `keepstep.checkpoint.foreign`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.checkpoint.errors import FormatUnsupported
from keepstep.checkpoint.foreign.foreign_source import LeftOut
from keepstep.checkpoint.foreign.opening import open_foreign, recognized_at
from keepstep.checkpoint.foreign.rank_cuts import RankRules
from keepstep.checkpoint.foreign.recognition import Format
from keepstep.checkpoint.layout.source import Source
from keepstep.checkpoint.stored.reader import StoredCheckpoint


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint of any format that is read.

    Attributes:
        source: its tensors and documents.
        format_name: its format, in words.
        left_out: what it has and `source` does not, with the reasons.
    """

    source: Source
    format_name: str
    left_out: tuple[LeftOut, ...] = ()


def open_any(
    url: str,
    form: Format | None = None,
    *,
    step: int | None = None,
    parameter_names: Sequence[str] | None = None,
    rank_rules: RankRules | None = None,
) -> Opened:
    """Open a checkpoint of any format that is read.

    Args:
        url: a path, `file://`, `s3://bucket/prefix` or `gs://bucket/prefix`.
        form: its format; None to tell it from the files.
        step: the step, of the universal format's only; None for the newest.
        parameter_names: names of the optimizer's parameters in the order of its groups, for
            formats that number them.
        rank_rules: what each rank's own files hold, for formats that do not say it.

    Raises:
        CheckpointMissing: there is nothing.
        FormatUnsupported: it is in no format that is read, or a step is given for another format.
        CheckpointDamaged: the files contradict themselves or each other.
        RulesInvalid: the rules do not fit the tensors.
    """
    if form is None:
        form = recognized_at(url)[0].format
    if form == Format.UNIVERSAL:
        stored = StoredCheckpoint.open(url, step)
        return Opened(stored, "keepstep")
    if step is not None:
        raise FormatUnsupported(
            f"{url} is in the format {form}: give the URL of the step itself instead of --step"
        )
    foreign = open_foreign(url, form, parameter_names, rank_rules)
    return Opened(foreign, foreign.format_name, foreign.left_out)
