"""Names where a checkpoint is, and its format, without loading what reads the format. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from keepstep.checkpoint.errors import FormatUnsupported


class Format(StrEnum):
    """The formats that are recognized, by the names that `--from` takes."""

    UNIVERSAL = "keepstep"
    TORCH_SAVE = "torch"
    TORCH_SHARDS = "torch-shards"
    LIGHTNING = "lightning"
    SAFETENSORS = "safetensors"
    HUGGING_FACE = "huggingface"
    ADAPTER = "peft"
    TRAINER = "trainer"
    ACCELERATE = "accelerate"
    DCP = "dcp"
    TORCHTITAN = "torchtitan"
    DEEPSPEED = "deepspeed"
    DEEPSPEED_UNIVERSAL = "deepspeed-universal"
    MEGATRON_CORE = "megatron-core"
    MEGATRON_LM = "megatron-lm"
    ORBAX = "orbax"


@dataclass(frozen=True, slots=True)
class Location:
    """Where a checkpoint is: as a user names it, or as it was found, whatever appears there later.

    Attributes:
        url: a path, `file://`, `s3://bucket/prefix` or `gs://bucket/prefix`.
        format: its format; None if it is not known yet.
        directory: its directory under the URL, of another tool's checkpoint that was found: empty,
            or ends with a slash.
        file_name: the file, if another tool's checkpoint is one.
        step: its step, of a checkpoint of keepstep's own that was found.
        generation: its generation, likewise.
    """

    url: str
    format: Format | None = None
    directory: str = ""
    file_name: str | None = None
    step: int | None = None
    generation: int | None = None


def split_format_prefix(text: str, given: Format | None = None) -> Location:
    """Return the location that `FORMAT:URL`, or a URL alone, names.

    Args:
        text: what the user names.
        given: the format that the user gives with it.

    Raises:
        FormatUnsupported: two different formats are given.
    """
    prefix, _, rest = text.partition(":")
    # A directory may have a format's name.
    if not rest or prefix not in list(Format) or prefix == Format.UNIVERSAL:
        return Location(text, given)
    if given not in (None, prefix):
        raise FormatUnsupported(f"{text}: the format is given as {prefix} and as {given}; give one")
    return Location(rest, Format(prefix))
