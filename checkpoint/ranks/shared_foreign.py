"""Opens another tool's checkpoint on all ranks: rank 0 says which one, each rank reads it.

A writer may finish a newer checkpoint while ranks look for the latest. So one rank looks, and the
others open what it has found.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from keepstep.checkpoint.convert.read.files import open_files
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.opening import locate_foreign, open_located
from keepstep.checkpoint.convert.rules.rank_shards import RankRules
from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointMissing, FormatUnsupported
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.location import Format, Location
from keepstep.checkpoint.format.layout.parameter_order import ParameterNames
from keepstep.checkpoint.ranks.control_group import ControlGroup


def find_foreign_together(
    url: str, group: ControlGroup, step: int | None = None
) -> Location | None:
    """Return the checkpoint of another tool that rank 0 finds at a URL; None if it finds none.

    Args:
        url: where it looks.
        group: the ranks.
        step: the step to prefer where there are directories of several; None for the latest.

    Raises:
        FormatUnsupported: the URL is that of a file of no known format; on all ranks.
        CheckpointError: rank 0 could not look; on all ranks.
    """

    def look() -> Location | None:
        try:
            found = locate_foreign(Location(url), step)
        except CheckpointMissing:
            return None
        except FormatUnsupported:
            if open_files(url).is_named:
                raise
            return None
        return None if found.format == Format.UNIVERSAL else found

    return _from_rank_0(look, url, group)


def open_foreign_together(
    location: Location,
    group: ControlGroup,
    found: Location | None = None,
    *,
    step: int | None = None,
    parameter_names: ParameterNames = None,
    rank_rules: RankRules | None = None,
) -> ForeignCheckpoint:
    """Open the same checkpoint of another tool on all ranks.

    Args:
        location: its URL, and its format if that is given.
        group: the ranks.
        found: what `find_foreign_together` has returned for it; None for rank 0 to look now.
        step: the step that it must have; None for any.
        parameter_names: the order of optimizers' parameters, for formats that number them.
        rank_rules: what each rank's own files hold, for formats that do not say it.

    Raises:
        CheckpointMissing: there is nothing, or it has another step.
        FormatUnsupported: it is in no format that is read here.
        CheckpointDamaged: the files contradict themselves or each other, or ranks do not read the
            same ones.
        CheckpointError: another rank could not open it.
    """
    url = location.url
    chosen = found or _from_rank_0(lambda: locate_foreign(location, step), url, group)
    assert chosen is not None

    def seen(opened: ForeignCheckpoint) -> Json:
        return [opened.format_name, opened.step, len(opened.foreign_tensors)]

    source, seen_by_rank = group.run_and_share(
        lambda: open_located(chosen, parameter_names, rank_rules), seen
    )
    for rank, other in zip(group.global_ranks, seen_by_rank, strict=True):
        if other != seen_by_rank[0]:
            raise CheckpointDamaged(
                f"{url}: rank {group.global_ranks[0]} reads {_described(seen_by_rank[0])}, and "
                f"rank {rank} reads {_described(other)}; give a URL where all ranks read the same "
                "files, and load when nobody writes there"
            )
    if step is not None and source.step != step:
        raise CheckpointMissing(
            f"{url}: step {step} is wanted, and {chosen.directory or 'what is there'} is "
            f"{source.format_name} of step {source.step} (0 where the files do not say); give the "
            "URL of the step itself, or no step"
        )
    return source


def _described(seen: Json) -> str:
    format_name, step, tensors = seen
    return f"{format_name} of step {step} with {tensors} tensors"


def _from_rank_0(
    look: Callable[[], Location | None], url: str, group: ControlGroup
) -> Location | None:
    def read() -> list[bytes]:
        found = look()
        location = None if found is None else [found.format, found.directory, found.file_name]
        return [json.dumps(location).encode()]

    (data,) = group.broadcast(read)
    location = json.loads(bytes(data))
    if location is None:
        return None
    format_name, directory, file_name = location
    return Location(url, Format(format_name), directory, file_name)
