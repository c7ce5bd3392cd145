"""Opens the checkpoint of another tool at a URL, in whatever format it is.

A format is a line in `_READERS`: a function of the checkpoint's files that returns a
`ForeignCheckpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from keepstep.checkpoint.convert.read.dcp_folders import read_dcp
from keepstep.checkpoint.convert.read.deepspeed_ranks import read_deepspeed
from keepstep.checkpoint.convert.read.deepspeed_universal import read_deepspeed_universal
from keepstep.checkpoint.convert.read.files import ForeignFiles, open_files
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.hugging_face import read_hugging_face, read_safetensors_alone
from keepstep.checkpoint.convert.read.megatron_core import read_megatron_core
from keepstep.checkpoint.convert.read.megatron_lm import read_megatron_lm
from keepstep.checkpoint.convert.read.orbax_folders import read_orbax
from keepstep.checkpoint.convert.read.recognition import recognize, recognize_all
from keepstep.checkpoint.convert.read.sharded_files import read_sharded_files
from keepstep.checkpoint.convert.read.state_dicts import read_state_dicts
from keepstep.checkpoint.convert.read.training_folders import (
    read_adapter,
    read_lightning,
    read_training_folder,
)
from keepstep.checkpoint.convert.rules.rank_shards import RankRules
from keepstep.checkpoint.errors import CheckpointMissing, FormatUnsupported
from keepstep.checkpoint.format.layout.location import Format, Location
from keepstep.checkpoint.format.layout.parameter_order import ParameterNames


@dataclass(frozen=True, slots=True)
class ReaderInput:
    """The input of a reader.

    Attributes:
        files: the checkpoint's files, with names relative to its directory.
        file_name: the file, where the checkpoint is one.
        parameter_names: names of the optimizer's parameters in the order of its groups, if the
            caller knows them.
        rank_rules: what each rank's own files hold of the parameters, if the caller knows it.
    """

    files: ForeignFiles
    file_name: str | None = None
    parameter_names: ParameterNames = None
    rank_rules: RankRules | None = None

    @property
    def file(self) -> str:
        """The file's name.

        Raises:
            FormatUnsupported: the checkpoint is a directory.
        """
        if self.file_name is None:
            raise FormatUnsupported(f"{self.files.url} is a directory, and this format is a file")
        return self.file_name


Reader = Callable[[ReaderInput], ForeignCheckpoint]

_READERS: Mapping[Format, Reader] = {
    Format.TORCH_SAVE: lambda o: read_state_dicts(o.files, o.file, o.parameter_names),
    Format.TORCH_SHARDS: lambda o: read_sharded_files(o.files, o.parameter_names),
    Format.SAFETENSORS: lambda o: read_safetensors_alone(o.files, o.file),
    Format.DCP: lambda o: read_dcp(o.files, o.parameter_names),
    Format.TORCHTITAN: lambda o: read_dcp(o.files, o.parameter_names),
    Format.DEEPSPEED: lambda o: read_deepspeed(o.files, o.parameter_names, o.rank_rules),
    Format.DEEPSPEED_UNIVERSAL: lambda o: read_deepspeed_universal(o.files, o.rank_rules),
    Format.MEGATRON_CORE: lambda o: read_megatron_core(o.files),
    Format.MEGATRON_LM: lambda o: read_megatron_lm(o.files),
    Format.HUGGING_FACE: lambda o: read_hugging_face(o.files),
    Format.TRAINER: lambda o: read_training_folder(
        o.files, "Hugging Face Trainer", o.parameter_names
    ),
    Format.ACCELERATE: lambda o: read_training_folder(o.files, "Accelerate", o.parameter_names),
    Format.ADAPTER: lambda o: read_adapter(o.files),
    Format.ORBAX: lambda o: read_orbax(o.files),
    Format.LIGHTNING: lambda o: read_lightning(o.files, o.file, o.parameter_names),
}


def find_foreign(url: str, step: int | None = None) -> Location | None:
    """Return where another tool's checkpoint is at a URL, of a step if there; None if nowhere."""
    try:
        found = locate_foreign(Location(url), step)
    except (CheckpointMissing, FormatUnsupported):
        return None
    return None if found.format == Format.UNIVERSAL else found


def all_foreign(url: str) -> tuple[Location, ...]:
    """Return every checkpoint of another tool at a URL, the one that is opened first.

    Raises:
        CheckpointMissing: there is nothing.
    """
    files = open_files(url)
    found = recognize_all(url, files.names, partial(_head, files))
    return tuple(each for each in found if each.format != Format.UNIVERSAL)


def _head(files: ForeignFiles, name: str, nbytes: int) -> tuple[bytes, int]:
    whole = files.file(name).whole
    return whole.part(0, min(nbytes, whole.nbytes)).read(nbytes), whole.nbytes


def locate_foreign(location: Location, step: int | None = None) -> Location:
    """Return which checkpoint of another tool is at a URL.

    Args:
        location: the URL, of a file or of a directory with one checkpoint or several; and the
            format, None to tell it from the files.
        step: the step that is wanted where directories of several are; None for the latest.

    Raises:
        CheckpointMissing: there is nothing.
        FormatUnsupported: it is in no format that is known, and none is given.
    """
    files = open_files(location.url)
    try:
        found = recognize(location.url, files.names, partial(_head, files), step)
    except FormatUnsupported as error:
        if location.format is None:
            raise FormatUnsupported(f"{location.url}: {error}") from None
    else:
        if location.format in (None, found.format):
            return found
    return replace(location, file_name=files.names[0] if len(files.names) == 1 else None)


def open_located(
    location: Location,
    parameter_names: ParameterNames = None,
    rank_rules: RankRules | None = None,
) -> ForeignCheckpoint:
    """Open exactly the checkpoint that was found, whatever else is at its URL by now.

    Args:
        location: what `find_foreign` or `locate_foreign` has returned.
        parameter_names: names of the optimizer's parameters in the order of its groups, for
            formats that number them.
        rank_rules: what each rank's own files hold, for formats with files of ranks of tensor
            parallelism that do not say it.

    Raises:
        CheckpointMissing: there is nothing.
        FormatUnsupported: it is in no format that is read here.
        CheckpointDamaged: the files contradict themselves or each other.
        RulesInvalid: the rules do not fit the tensors.
    """
    reader = None if location.format is None else _READERS.get(location.format)
    if reader is None:
        raise FormatUnsupported(
            f"{location.url}: checkpoints of {location.format} cannot be read yet"
        )
    files = files_of(location)
    return reader(ReaderInput(files, location.file_name, parameter_names, rank_rules))


def files_of(location: Location) -> ForeignFiles:
    """Return the files of a checkpoint that was found.

    Raises:
        CheckpointMissing: there is nothing.
    """
    files = open_files(location.url)
    return files.below(location.directory) if location.directory else files
