"""Opens what a conversion reads: a checkpoint in the universal format, or in another tool's.

The universal format is recognized by its manifests, another tool's by `checkpoint.convert.read`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint, LeftOut
from keepstep.checkpoint.convert.read.opening import locate_foreign, open_located
from keepstep.checkpoint.convert.rules.rank_shards import RankRules
from keepstep.checkpoint.errors import CheckpointMissing, FormatUnsupported, LayoutMismatch
from keepstep.checkpoint.format.layout.location import Format, Location, split_format_prefix
from keepstep.checkpoint.format.layout.names import check_keys
from keepstep.checkpoint.format.layout.source import Source
from keepstep.checkpoint.format.layout.wrapper_names import PARALLEL, without_wrappers
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import list_steps, newest
from keepstep.checkpoint.format.stored.storage import open_storage

_MODEL = "model/"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint of any format that is read.

    Attributes:
        source: its tensors and documents.
        format_name: its format, in words.
        left_out: what it has and `source` does not, with the reasons.
        without_wrappers: of how many tensors the names of wrappers were taken off.
    """

    source: Source
    format_name: str
    left_out: tuple[LeftOut, ...] = ()
    without_wrappers: int = 0


def locate(url: str, form: Format | None = None, *, step: int | None = None) -> Location:
    """Return where the checkpoint is that a user names.

    Args:
        url: as for `Location`; its format may come before it, as in `deepspeed:/path`.
        form: its format; None to tell it from the files.
        step: the step, of the universal format's only; None for the newest.

    Raises:
        CheckpointMissing: there is nothing, or not this step.
        FormatUnsupported: it is in no format that is known, or a step is given for another format.
    """
    location = split_format_prefix(url, form)
    # Keepstep's own is found without a list of all files, which may be many.
    is_own = location.format in (None, Format.UNIVERSAL)
    newest_own = newest(open_storage(location.url)) if is_own else None
    if newest_own is None and location.format != Format.UNIVERSAL:
        location = locate_foreign(location)
    if newest_own is None and location.format != Format.UNIVERSAL:
        if step is None:
            return location
        raise FormatUnsupported(
            f"{location.url} is in the format {location.format}: give the URL of the step itself "
            "instead of --step"
        )
    storage = open_storage(location.url)
    listed = (stored for stored in list_steps(storage) if stored.step == step)
    chosen = newest_own if step is None else next(listed, None)
    if chosen is None:
        # It says which steps there are.
        StoredCheckpoint.open(storage, step)
        raise CheckpointMissing(f"{url}: the checkpoint came a moment ago; try again")
    return Location(location.url, Format.UNIVERSAL, step=chosen.step, generation=chosen.generation)


def open_location(
    location: Location,
    parameter_names: Sequence[str] | None = None,
    rank_rules: RankRules | None = None,
) -> Checkpoint:
    """Open a checkpoint that was located.

    Args:
        parameter_names: names of the optimizer's parameters in the order of its groups, for
            formats that number them.
        rank_rules: what each rank's own files hold, for formats that do not say it.

    Raises:
        CheckpointMissing: it is gone.
        FormatUnsupported: its format is not read.
        CheckpointDamaged: the files contradict themselves or each other.
        RulesInvalid: the rules do not fit the tensors.
    """
    if location.format == Format.UNIVERSAL:
        storage = open_storage(location.url)
        own = StoredCheckpoint.open(storage, location.step, location.generation)
        return Checkpoint(own, "keepstep")
    foreign = open_located(location, parameter_names, rank_rules)
    return Checkpoint(foreign, foreign.format_name, foreign.left_out)


def without_wrapper_names(opened: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose tensors have no names of modules that only wrap another one.

    `_orig_mod`, `_fsdp_wrapped_module` and `_checkpoint_wrapped_module` are wrappers' wherever they
    are; `module` is one's if all names of the model begin with it, as `DistributedDataParallel` has
    it.

    Raises:
        LayoutMismatch: what is left of a name cannot name a tensor.
    """
    source = opened.source
    if not isinstance(source, StoredCheckpoint | ForeignCheckpoint):
        return opened
    names = {
        without_wrappers(key.removeprefix(_MODEL)) for key in source.tensors if _is_of_model(key)
    }
    if all(name.startswith(f"{PARALLEL}.") for name in names):
        names = {name.removeprefix(f"{PARALLEL}.") for name in names}
    named = source.named_for(names)
    try:
        check_keys(named.tensors)
    except ValueError as error:
        raise LayoutMismatch(f"without the names of wrappers: {error}") from error
    renamed = len(named.tensors.keys() - source.tensors.keys())
    return replace(opened, source=named, without_wrappers=renamed)


def _is_of_model(key: str) -> bool:
    return key.startswith(_MODEL)
