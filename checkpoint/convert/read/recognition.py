"""Recognizes the format of a checkpoint by the names of its files and a few of their bytes.

Pure. A directory of several checkpoints, as training writes, stands for the one that it notes as
the latest, else for that of the greatest number.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from keepstep.checkpoint.convert.read.safetensors_file import is_safetensors
from keepstep.checkpoint.convert.read.torch_file import is_torch_file
from keepstep.checkpoint.errors import FormatUnsupported
from keepstep.checkpoint.format.layout.location import Format, Location

Head = Callable[[str, int], tuple[bytes, int]]
"""Returns a file's beginning, of up to a number of bytes, and the file's size."""


# The bytes that distinguish files of torch lie here: the pickle comes first in the zip.
_HEAD_NBYTES = 2**16
_METADATA_NBYTES = 2**26
_POINTER_NBYTES = 4096

_NUMBERED = re.compile(r"[A-Za-z_-]*(\d+)(?:_universal)?")
_POINTERS = ("latest", "latest_universal", "latest_checkpointed_iteration.txt")

# Names of files that differ in the rank only, and the classes of what they have.
_OF_RANK = re.compile(r"([^/]*?)(\d{1,6})([^/\d]*\.(?:pt|pth|bin|ckpt|tar))")
_SHARD_CLASSES = (b"ShardedTensor", b"torch.distributed.tensor")

_SIGNS: tuple[tuple[Format, re.Pattern[str]], ...] = tuple(
    (form, re.compile(pattern))
    for form, pattern in (
        (Format.UNIVERSAL, r"step-\d{8,}-\d{6,}/manifest\.json"),
        (Format.DEEPSPEED_UNIVERSAL, r"zero/.+/fp32\.pt"),
        (
            Format.DEEPSPEED,
            r"(?:bf16_|fp16_)?(?:zero_pp_rank_\d+_)?mp_rank_\d+_(?:model|optim)_states\.pt",
        ),
        (Format.MEGATRON_LM, r"mp_rank_\d+(?:_\d+)*/model_(?:optim_)?rng\.pt"),
        # A folder of steps has trees in folders too, which are named by numbers.
        (
            Format.ORBAX,
            r"(?:(?![A-Za-z_-]*\d+/|[^/]*\.orbax-checkpoint-tmp)[^/]+/)?_METADATA"
            r"|_CHECKPOINT_METADATA",
        ),
        (Format.TRAINER, r"trainer_state\.json"),
        (Format.ACCELERATE, r"random_states_\d+\.pkl"),
        (Format.ADAPTER, r"adapter_model\.(?:safetensors|bin)"),
        (Format.HUGGING_FACE, r"(?:model|pytorch_model)\.(?:safetensors|bin)(?:\.index\.json)?"),
    )
)


def recognize(url: str, names: Sequence[str], head: Head, step: int | None = None) -> Location:
    """Return the format of what lies at a place.

    Args:
        url: the URL of the checkpoint, or of the folder that has it.
        names: all files there, relative to the place; of a file alone, its name.
        head: reads the beginning of one.
        step: the step that is wanted of several; None for the latest.

    Raises:
        FormatUnsupported: it is none that is known; the message says what was looked for.
    """
    if len(names) == 1:
        form = _format_of_file(names[0], head)
        if form is not None:
            return Location(url, form, file_name=names[0])
    inside = _names_by_directory(names)
    for directory in _directories(inside, head, step):
        form = _format_at(directory, inside[directory], head)
        if form is not None:
            return Location(url, form, directory)
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    raise FormatUnsupported(
        "no checkpoint was recognized: it is no file of torch.save or safetensors, and no "
        "directory with .metadata (DCP), metadata.json (Megatron-Core), "
        "mp_rank_*_model_states.pt or zero/*/fp32.pt (DeepSpeed), "
        "mp_rank_*/model_optim_rng.pt (Megatron-LM), _METADATA (Orbax), "
        "model.safetensors, pytorch_model.bin, adapter_model.safetensors, trainer_state.json, "
        f"random_states_*.pkl (Hugging Face) or step-*/manifest.json (keepstep); it has {shown}"
    )


def recognize_all(url: str, names: Sequence[str], head: Head) -> tuple[Location, ...]:
    """Return every checkpoint at a place, the one that `recognize` takes first."""
    if len(names) == 1 and (form := _format_of_file(names[0], head)) is not None:
        return (Location(url, form, file_name=names[0]),)
    inside = _names_by_directory(names)
    directories = dict.fromkeys(_directories(inside, head, None))
    forms = ((each, _format_at(each, inside[each], head)) for each in directories)
    return tuple(Location(url, form, directory) for directory, form in forms if form is not None)


def _names_by_directory(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the directories in which a checkpoint may be, and the names inside each."""
    # In one pass: a run may have thousands of directories of thousands of files.
    inside: dict[str, list[str]] = defaultdict(list, {"": list(names)})
    for name in names:
        first, separator, rest = name.partition("/")
        if separator:
            inside[f"{first}/"].append(rest)
        second, separator, rest = rest.partition("/")
        if separator and first == "checkpoint":
            inside[f"checkpoint/{second}/"].append(rest)
    return inside


def _directories(
    inside: Mapping[str, Sequence[str]], head: Head, step: int | None
) -> Iterator[str]:
    """Yield where a checkpoint may be, the likeliest first."""
    known = set(inside[""])
    numbered = []
    for directory in inside:
        match = _NUMBERED.fullmatch(directory.rstrip("/").rpartition("/")[2])
        if match:
            numbered.append((int(match[1]), directory))
    yield from (directory for number, directory in sorted(numbered) if number == step)
    yield ""
    for pointer in _POINTERS:
        if pointer in known:
            content = head(pointer, _POINTER_NBYTES)[0].decode(errors="replace").strip()
            named = f"iter_{int(content):07d}" if re.fullmatch(r"\d{1,9}", content) else content
            if f"{named}/" in inside:
                yield f"{named}/"
    for _, directory in sorted(numbered, reverse=True):
        yield directory


def _format_at(directory: str, inside: Sequence[str], head: Head) -> Format | None:
    """Return the format of the checkpoint in a directory, or None if there is none.

    Args:
        inside: the names of the files inside, relative to it.
    """
    known = set(inside)
    if "metadata.json" in known and _is_megatron(
        head(f"{directory}metadata.json", _POINTER_NBYTES)[0]
    ):
        return Format.MEGATRON_CORE
    if ".metadata" in known:
        content, _ = head(f"{directory}.metadata", _METADATA_NBYTES)
        return Format.TORCHTITAN if b"train_state.step" in content else Format.DCP
    for form, pattern in _SIGNS:
        if any(pattern.fullmatch(name) for name in inside):
            return form
    weights = [name for name in inside if name.endswith(".safetensors") and "/" not in name]
    if "config.json" in known and weights:
        return Format.HUGGING_FACE
    return Format.TORCH_SHARDS if _are_shards(directory, inside, head) else None


def rank_of_file(name: str) -> int | None:
    """Return the rank in the name of a file that a rank wrote for itself; None if it has none."""
    match = _OF_RANK.fullmatch(name)
    return int(match[2]) if match else None


def _are_shards(directory: str, names: Sequence[str], head: Head) -> bool:
    """Return whether files of all ranks, and no others, have shards of tensors."""
    matches = [match for name in names if (match := _OF_RANK.fullmatch(name))]
    if (
        len(matches) < max(len(names), 2)
        or len({(match[1], match[3]) for match in matches}) != 1
        or {int(match[2]) for match in matches} != set(range(len(matches)))
    ):
        return False
    content, _ = head(f"{directory}{names[0]}", _HEAD_NBYTES)
    return is_torch_file(content) and any(sign in content for sign in _SHARD_CLASSES)


def _is_megatron(content: bytes) -> bool:
    try:
        description = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(description, dict) and "sharded_backend" in description


def _format_of_file(name: str, head: Head) -> Format | None:
    content, nbytes = head(name, _HEAD_NBYTES)
    if is_torch_file(content):
        return Format.LIGHTNING if b"pytorch-lightning_version" in content else Format.TORCH_SAVE
    return Format.SAFETENSORS if is_safetensors(content, nbytes) else None
