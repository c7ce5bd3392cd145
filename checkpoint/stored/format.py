"""Objects of a stored checkpoint that FORMAT.md specifies: names, Zarr metadata, parts, manifest.

Pure. Everything that was read from storage is checked here before it is used.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import crc32c

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointTooNew
from keepstep.checkpoint.layout.boxes import Json
from keepstep.checkpoint.layout.dtypes import is_in_zarr, numpy_dtype, zarr_data_type
from keepstep.checkpoint.layout.names import check_keys
from keepstep.checkpoint.stored.chunking import StoredTensor

VERSION = 3
MANIFEST = "manifest.json"
DOCUMENTS = "documents.json"
CHUNKS = "chunks.json"
ROOT = "zarr.json"
REMOVED = "removed.json"
NEWEST = "newest.json"
MODEL = "model"

FEATURES = frozenset[str]()
"""The features that this release knows, of those that a manifest may require (FORMAT.md)."""

_TORCH_DTYPE = "torch_dtype"
_PARTS = "parts"
_PACKS = "packs"

_MAX_NAME_NBYTES = 255
_ABSENT = 2**64 - 1
# The index at the end of a chunk is computed to compare it; chunks have far fewer cells than this.
_MAX_CELLS = 2**20

_STEP_NAME = re.compile(r"step-(\d{8})-(\d{6})")
_ATTEMPT_NAME = re.compile(r"[0-9a-z][0-9a-z-]{0,63}")
_ATTEMPT_PREFIX = "attempt-"
_PART_NAME = re.compile(r"parts/(\d{6,9})\.json")


@dataclass(frozen=True, slots=True)
class StoredStep:
    """The name of a checkpoint: completed steps, and the generation that wrote it."""

    step: int
    generation: int

    def __post_init__(self) -> None:
        # More digits would sort wrongly, and `parse` would not accept them.
        if not (0 <= self.step < 10**8 and 0 <= self.generation < 10**6):
            raise ValueError(
                f"step {self.step} or generation {self.generation} is out of the format's range"
            )

    @property
    def directory(self) -> str:
        """Name of the directory under the job's URL; each generation has its own."""
        return f"step-{self.step:08d}-{self.generation:06d}"

    @classmethod
    def parse(cls, name: str) -> StoredStep | None:
        """Return the step that a directory is named after, or None if it is not a step's."""
        match = _STEP_NAME.fullmatch(name)
        return cls(int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to write a checkpoint: it writes into a directory of its own, then the manifest.

    All writers of an attempt give the same name, of digits, small letters and hyphens; no other
    attempt ever has it. So a writer that is late changes nothing of another attempt.
    """

    stored: StoredStep
    name: str

    def __post_init__(self) -> None:
        if not _ATTEMPT_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} cannot name an attempt to write a checkpoint")

    @property
    def directory(self) -> str:
        """Name of the attempt's directory under the job's URL."""
        return f"{self.stored.directory}/{_ATTEMPT_PREFIX}{self.name}"

    @staticmethod
    def is_directory(name: str) -> bool:
        """Return whether a directory below a step's is named as an attempt's is."""
        return bool(
            name.startswith(_ATTEMPT_PREFIX)
            and _ATTEMPT_NAME.fullmatch(name.removeprefix(_ATTEMPT_PREFIX))
        )


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object's entry: name under the attempt's directory, size in bytes, crc32c."""

    name: str
    nbytes: int
    crc32c: int

    @property
    def is_part(self) -> bool:
        """Whether the object is a writer's listing."""
        match = _PART_NAME.fullmatch(self.name)
        return match is not None and part_name(int(match[1])) == self.name

    @property
    def part_number(self) -> int:
        """The number of a writer's listing.

        Raises:
            ValueError: it is none.
        """
        match = _PART_NAME.fullmatch(self.name)
        if match is None:
            raise ValueError(f"{self.name} is not a part")
        return int(match[1])

    def to_json(self) -> Json:
        """Return the object as a JSON list."""
        return [self.name, self.nbytes, self.crc32c]

    @classmethod
    def from_json(cls, data: Json) -> StoredObject:
        """Parse what `to_json` returned.

        Raises:
            CheckpointDamaged: the data has another form.
        """
        if not (isinstance(data, list) and len(data) == 3 and isinstance(data[0], str)):
            raise CheckpointDamaged(f"not an object's entry: {data!r:.200}")
        name, nbytes, crc = data
        if not (_is_count(nbytes) and _is_count(crc) and crc < 2**32 and _is_object_name(name)):
            raise CheckpointDamaged(f"not an object's entry: {data!r:.200}")
        return cls(name, nbytes, crc)


@dataclass(frozen=True, slots=True)
class ChunkObject:
    """A chunk that is an object of its own.

    `checksums` are the crc32c of its cells in C order, 4 bytes each, little endian; a cell beyond
    the tensor's edge has none.
    """

    name: str
    nbytes: int
    checksums: bytes

    @property
    def key(self) -> str:
        """The chunk's tensor, if the name is that of a chunk."""
        return self.name.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """A chunk in a pack: its tensor's key, its place in the grid, its cells' checksums."""

    key: str
    place: tuple[int, ...]
    checksums: bytes


@dataclass(frozen=True, slots=True)
class Pack:
    """An object with chunks of several tensors, one after the other."""

    name: str
    nbytes: int
    chunks: tuple[PackedChunk, ...]


DataObject = ChunkObject | Pack


def encode_checksums(checksums: Sequence[int]) -> bytes:
    """Return checksums as 4 bytes each, little endian."""
    return struct.pack(f"<{len(checksums)}I", *checksums)


def decode_checksums(data: bytes) -> tuple[int, ...]:
    """Return what `encode_checksums` was given."""
    return struct.unpack(f"<{len(data) // 4}I", data)


def encode_part(objects: Sequence[DataObject]) -> bytes:
    """Return the listing of the data objects that one writer wrote, as JSON."""
    return encode(
        [
            [item.name, item.nbytes, _as_text(item.checksums)]
            if isinstance(item, ChunkObject)
            else [
                item.name,
                item.nbytes,
                [
                    [chunk.key, list(chunk.place), _as_text(chunk.checksums)]
                    for chunk in item.chunks
                ],
            ]
            for item in objects
        ]
    )


def decode_part(data: bytes, where: str) -> tuple[DataObject, ...]:
    """Parse what `encode_part` returned, or what older formats have instead.

    Raises:
        CheckpointDamaged: the data has another form.
    """
    listing = decode(data, where)
    try:
        return tuple(_parse_object(*item) for item in listing)
    except (TypeError, ValueError) as error:
        raise CheckpointDamaged(f"{where} is not a listing: {error}; load an older step") from error


def _parse_object(name: Json, nbytes: Json, content: Json) -> DataObject:
    if not (_is_object_name(name) and _is_count(nbytes)):
        raise ValueError(f"not an object's entry: {name!r:.200}")
    if not name.startswith(f"{_PACKS}/"):
        return ChunkObject(name, nbytes, _parse_checksums(content))
    if not isinstance(content, list):
        raise ValueError(f"{name}: chunks {content!r:.200}")
    chunks: list[PackedChunk] = []
    for key, *entries in content:
        if not isinstance(key, str):
            raise ValueError(f"{name}: key {key!r:.200}")
        if len(entries) == 2 and isinstance(entries[1], str):
            place, checksums = entries
            if not (isinstance(place, list) and all(map(_is_count, place))):
                raise ValueError(f"{name}: chunk {place!r:.200} of {key!r:.200}")
            chunks.append(PackedChunk(key, tuple(place), _parse_checksums(checksums)))
            continue
        for entry in entries:
            # In formats 1 and 2 each cell is a chunk: its place, followed by its checksum.
            if not (isinstance(entry, list) and entry and all(map(_is_count, entry))):
                raise ValueError(f"{name}: cell {entry!r:.200} of {key!r:.200}")
            chunks.append(PackedChunk(key, tuple(entry[:-1]), _parse_checksums(entry[-1:])))
    return Pack(name, nbytes, tuple(chunks))


def _as_text(checksums: bytes) -> str:
    return base64.b64encode(checksums).decode()


def _parse_checksums(content: Json) -> bytes:
    """Parse checksums in base64; formats 1 and 2 have numbers, null for a cell beyond the edge."""
    if isinstance(content, list):
        present = [crc for crc in content if crc is not None]
        if not all(_is_count(crc) and crc < 2**32 for crc in present):
            raise ValueError(f"checksums {content!r:.200}")
        return encode_checksums(present)
    checksums = base64.b64decode(content, validate=True)
    if len(checksums) % 4:
        raise ValueError(f"checksums {content!r:.200}")
    return checksums


def encode_chunk_parts(parts: Mapping[str, Sequence[int]]) -> bytes:
    """Return the document that tells which part lists each chunk.

    Args:
        parts: for each tensor, the number of the part of each of its chunks, in C order.
    """
    return encode(
        {
            key: numbers[0]
            if len(set(numbers)) == 1
            else base64.b64encode(struct.pack(f"<{len(numbers)}I", *numbers)).decode()
            for key, numbers in sorted(parts.items())
            if numbers
        }
    )


def decode_chunk_parts(data: bytes, where: str) -> dict[str, int | tuple[int, ...]]:
    """Parse what `encode_chunk_parts` returned: one number where all chunks are in one part.

    Raises:
        CheckpointDamaged: the data has another form.
    """
    content = decode(data, where)
    parts: dict[str, int | tuple[int, ...]] = {}
    try:
        for key, numbers in content.items():
            if _is_count(numbers):
                parts[key] = numbers
            else:
                packed = base64.b64decode(numbers, validate=True)
                parts[key] = struct.unpack(f"<{len(packed) // 4}I", packed)
    except (AttributeError, TypeError, ValueError, struct.error) as error:
        raise CheckpointDamaged(
            f"{where} does not tell which part lists a chunk: {error}; load an older step"
        ) from error
    return parts


@dataclass(frozen=True, slots=True)
class Manifest:
    """The object that makes a directory a checkpoint.

    `attempt` is the name of the attempt that wrote the checkpoint; None in format 1, whose objects
    lie in the step's directory. `objects` are the parts, the root metadata and the documents.
    `required` are the features that a reader must know.
    """

    step: int
    generation: int
    attempt: str | None
    objects: tuple[StoredObject, ...]
    required: tuple[str, ...] = ()

    @property
    def directory(self) -> str:
        """Name of the directory, under the job's URL, that has the checkpoint's objects."""
        stored = StoredStep(self.step, self.generation)
        return stored.directory if self.attempt is None else Attempt(stored, self.attempt).directory

    def encode(self) -> bytes:
        """Return the manifest as JSON, with its own checksum."""
        content = {
            "format": VERSION,
            "required": list(self.required),
            "step": self.step,
            "generation": self.generation,
            "attempt": self.attempt,
            "objects": [item.to_json() for item in self.objects],
        }
        return encode({**content, "crc32c": crc32c.crc32c(encode(content))})

    @classmethod
    def decode(cls, data: bytes, where: str) -> Manifest:
        """Parse what `encode` returned.

        Raises:
            CheckpointDamaged: the data has another form.
            CheckpointTooNew: the format is newer than this release, or requires a feature that
                this release does not know.
        """
        content = decode(data, where)
        try:
            checksum = content.pop("crc32c", None)
            if checksum not in (None, crc32c.crc32c(encode(content))):
                raise ValueError("it does not match its checksum")
            version = content["format"]
            # Of a newer format nothing else is known, not even where it has its features.
            required = content["required"] if version in range(3, VERSION + 1) else []
            _check_readable(version, required, where)
            objects = tuple(StoredObject.from_json(item) for item in content["objects"])
            step, generation = content["step"], content["generation"]
            if not (_is_count(step) and _is_count(generation)):
                raise ValueError(f"step {step!r}, generation {generation!r}")
            attempt = None
            if version != 1:
                if checksum is None:
                    raise ValueError("it has no checksum")
                attempt = Attempt(StoredStep(step, generation), content["attempt"]).name
            if len({item.name for item in objects}) != len(objects):
                raise ValueError("it lists an object twice")
            return cls(step, generation, attempt, objects, tuple(required))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise CheckpointDamaged(f"{where} is not a manifest: {error!r}") from error

    def part_names(self) -> dict[int, str]:
        """Return the names of the parts by their numbers."""
        return {item.part_number: item.name for item in self.objects if item.is_part}

    def find(self, name: str) -> StoredObject | None:
        """Return the entry of an object, if the manifest has one."""
        return next((item for item in self.objects if item.name == name), None)


def encode(content: Json) -> bytes:
    """Return JSON as it is stored: UTF-8, compact, keys in the order given.

    Numbers must be finite, as JSON's are; see `keepstep.checkpoint.stored.strict_json`.
    """
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def decode(data: bytes, where: str) -> Any:
    """Parse stored JSON.

    Raises:
        CheckpointDamaged: it is not JSON.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{where} is not JSON: {error}") from error


def chunk_name(key: str, place: Sequence[int]) -> str:
    """Return a chunk's object name, by Zarr's default chunk key encoding."""
    return f"{key}/{'.'.join(['c', *map(str, place)])}"


def part_name(writer: int) -> str:
    """Return the name of a writer's listing."""
    return f"{_PARTS}/{writer:06d}.json"


def pack_name(writer: int, number: int) -> str:
    """Return the name of one of a writer's packs."""
    return f"{_PACKS}/{writer:06d}-{number:04d}"


def shard_index(tensor: StoredTensor, present: Sequence[int]) -> bytes:
    """Return the index at the end of a chunk's object, as Zarr's codec `sharding_indexed` has it.

    The index is each cell's offset and size in bytes, followed by the crc32c of these numbers.

    Args:
        tensor: the chunk's tensor.
        present: the numbers of the cells that the chunk has, ascending.
    """
    size = tensor.cell_nbytes + 4
    numbers = [_ABSENT] * (2 * cells_per_chunk(tensor))
    for position, number in enumerate(present):
        numbers[2 * number : 2 * number + 2] = [position * size, size]
    index = struct.pack(f"<{len(numbers)}Q", *numbers)
    checksum: int = crc32c.crc32c(index)
    return index + checksum.to_bytes(4, "little")


def shard_index_nbytes(cells: int) -> int:
    """Return the size of the index at the end of a chunk of so many cells."""
    return 16 * cells + 4


def cells_per_chunk(tensor: StoredTensor) -> int:
    """Return the number of cells in a chunk, including those beyond the tensor's edge."""
    return math.prod(extent // cell for extent, cell in zip(tensor.chunk, tensor.cell, strict=True))


def array_metadata(key: str, tensor: StoredTensor) -> Json:
    """Return the Zarr v3 metadata of a tensor's array."""
    cell_codecs: list[Json] = [
        {"name": "bytes", "configuration": {"endian": "little"}}
        if numpy_dtype(tensor.dtype).itemsize > 1
        else {"name": "bytes"},
        {"name": "crc32c"},
    ]
    codec: Json = {
        "name": "keepstep.packed",
        "configuration": {"key": key, "chunk_shape": list(tensor.chunk), "codecs": cell_codecs},
    }
    if not tensor.is_packed:
        codec = {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": list(tensor.cell),
                "codecs": cell_codecs,
                "index_codecs": [
                    {"name": "bytes", "configuration": {"endian": "little"}},
                    {"name": "crc32c"},
                ],
                "index_location": "end",
            },
        }
    attributes = dict(tensor.attributes)
    if not is_in_zarr(tensor.dtype):
        attributes["keepstep"] = {**attributes.get("keepstep", {}), _TORCH_DTYPE: tensor.dtype}
    name = key.rpartition("/")[2]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(tensor.shape),
        "data_type": zarr_data_type(tensor.dtype),
        "chunk_grid": {
            "name": "regular",
            "configuration": {
                "chunk_shape": list(tensor.cell if tensor.is_packed else tensor.chunk)
            },
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": _fill_value(zarr_data_type(tensor.dtype)),
        "codecs": [codec],
        # xarray requires names, and arrays of one group that share one must agree in the extent.
        "dimension_names": [f"{name}.{axis}" for axis in range(len(tensor.shape))],
        "attributes": attributes,
    }


def root_metadata(
    stored: StoredStep,
    listings: Sequence[StoredObject],
    tensors: Mapping[str, StoredTensor],
) -> Json:
    """Return the root group's metadata with that of all nodes below it: opening takes one read.

    Args:
        stored: the checkpoint.
        listings: the entries of the parts, and of the object that tells which part lists a chunk:
            readers by way of Zarr open the attempt's directory, and do not see the manifest, which
            lies above it.
        tensors: all arrays by key.
    """
    nodes: dict[str, Json] = {}
    for key in sorted(tensors):
        names = key.split("/")
        for depth in range(1, len(names)):
            nodes.setdefault("/".join(names[:depth]), group_metadata("/".join(names[:depth])))
        nodes[key] = array_metadata(key, tensors[key])
    return {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {
            "keepstep": {
                "format": VERSION,
                "required": [],
                "step": stored.step,
                "generation": stored.generation,
                "listings": [listing.to_json() for listing in listings],
            },
            "description": "A PyTorch training checkpoint. model/: parameters and buffers by name; "
            "optim/<parameter>/<slot>: optimizer state; rank/: random number generators; "
            "documents.json: what is no tensor. Complete if and only if the manifest.json in the "
            "directory above names this directory.",
        },
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": nodes},
    }


def parse_listings(root: bytes, where: str) -> tuple[StoredObject, ...] | None:
    """Return the listings' entries in the root metadata; None in format 1, which has none there.

    Raises:
        CheckpointDamaged: the metadata has another form.
    """
    content = decode(root, where)
    try:
        attributes = content["attributes"]["keepstep"]
        if attributes["format"] == 1:
            return None
        _check_readable(attributes["format"], attributes.get("required", []), where)
        listings = attributes["parts" if attributes["format"] == 2 else "listings"]
        return tuple(StoredObject.from_json(listing) for listing in listings)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointDamaged(
            f"{where} does not list the parts of a checkpoint: {error!r}; load an older step"
        ) from error


def group_metadata(path: str) -> Json:
    """Return the metadata of a group below the root."""
    meaning = {
        MODEL: "parameters and persistent buffers, each a whole tensor under its name "
        "in the module",
        "optim": "one group per parameter, one array per optimizer slot",
        "rank": "what belongs to one rank only",
    }
    attributes = {"description": meaning[path]} if path in meaning else {}
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def parse_root(data: bytes, where: str) -> dict[str, StoredTensor]:
    """Return the tensors that the root metadata describes, each checked.

    Raises:
        CheckpointDamaged: an array does not conform to this format.
    """
    content = decode(data, where)
    try:
        nodes = content["consolidated_metadata"]["metadata"]
        arrays = {key: node for key, node in nodes.items() if node["node_type"] == "array"}
        check_keys(arrays)
        return {key: _parse_array(key, node) for key, node in arrays.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointDamaged(
            f"{where} is not a checkpoint's root metadata: {error}; load an older step"
        ) from error


def _parse_array(key: str, node: Any) -> StoredTensor:
    """Parse the fields that may vary, and check that the others are what this format writes."""
    shape, chunk = node["shape"], node["chunk_grid"]["configuration"]["chunk_shape"]
    if not (isinstance(shape, list) and isinstance(chunk, list) and len(shape) == len(chunk)):
        raise ValueError(f"{key}: shape {shape} with chunks {chunk}")
    if not (all(_is_count(n) for n in (*shape, *chunk)) and all(chunk)):
        raise ValueError(f"{key}: shape {shape} with chunks {chunk}")
    (codec,) = node["codecs"]
    configuration = codec["configuration"]
    is_packed = codec["name"] == "keepstep.packed"
    # In formats 1 and 2 each cell of a packed array is a chunk.
    inner = configuration.setdefault("chunk_shape", chunk) if is_packed else None
    cell = chunk if is_packed else configuration["chunk_shape"]
    chunk = inner if is_packed else chunk
    attributes = node.get("attributes", {})
    if not isinstance(attributes, dict):
        raise ValueError(f"{key}: attributes {attributes!r:.200}")
    if not (
        isinstance(chunk, list)
        and len(chunk) == len(shape)
        and all(_is_count(n) and n for n in chunk)
    ):
        raise ValueError(f"{key}: chunks {chunk}")
    if not (
        isinstance(cell, list) and len(cell) == len(chunk) and all(_is_count(n) and n for n in cell)
    ):
        raise ValueError(f"{key}: cells {cell}")
    if any(extent % part for extent, part in zip(chunk, cell, strict=True)):
        raise ValueError(f"{key}: cells {cell} do not divide chunks {chunk}")
    dtype, attributes = _parse_data_type(key, node["data_type"], attributes)
    tensor = StoredTensor(
        dtype=dtype,
        shape=tuple(shape),
        chunk=tuple(chunk),
        cell=tuple(cell),
        is_packed=is_packed,
        attributes=attributes,
    )
    numpy_dtype(tensor.dtype)
    if not is_packed and cells_per_chunk(tensor) > _MAX_CELLS:
        raise ValueError(f"{key}: {cells_per_chunk(tensor)} cells in a chunk")
    expected = array_metadata(key, tensor)
    for field in (
        "zarr_format",
        "shape",
        "data_type",
        "chunk_grid",
        "chunk_key_encoding",
        "codecs",
    ):
        if node[field] != expected[field]:
            raise ValueError(
                f"{key}: {field} is {node[field]!r:.200}, this format has {expected[field]!r:.200}"
            )
    return tensor


def _parse_data_type(
    key: str, data_type: Json, attributes: dict[str, Json]
) -> tuple[str, dict[str, Json]]:
    """Return the data type that an array holds, and the attributes without what names it."""
    own = attributes.get("keepstep")
    if not isinstance(own, dict):
        return str(data_type), attributes
    named = own.get(_TORCH_DTYPE)
    if not isinstance(named, str) or is_in_zarr(named):
        return str(data_type), attributes
    if data_type != zarr_data_type(named):
        raise ValueError(f"{key}: {_TORCH_DTYPE} {named} with data type {data_type!r:.200}")
    rest = {name: value for name, value in own.items() if name != _TORCH_DTYPE}
    others = {name: value for name, value in attributes.items() if name != "keepstep"}
    return named, {**others, "keepstep": rest} if rest else others


def _check_readable(version: Any, required: Any, where: str) -> None:
    """Check that this release reads a format with these required features.

    Raises:
        CheckpointTooNew: it does not.
        ValueError: they have another form.
    """
    if not _is_count(version) or version < 1:
        raise ValueError(f"format {version!r}")
    if version > VERSION:
        raise CheckpointTooNew(
            f"{where} has format {version}, this keepstep reads up to {VERSION}; use the release "
            "that wrote it, or a later one"
        )
    if not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        raise ValueError(f"required features {required!r:.200}")
    if unknown := [name for name in required if name not in FEATURES]:
        raise CheckpointTooNew(
            f"{where} requires {', '.join(map(repr, unknown))}, which this keepstep does not know; "
            "use the release that wrote it, or a later one"
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_object_name(name: Json) -> bool:
    """Return whether an object of a checkpoint can have this name, below its directory."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and all(
            part not in ("", ".", "..") and len(part.encode()) <= _MAX_NAME_NBYTES
            for part in name.split("/")
        )
    )


def _fill_value(dtype: str) -> Json:
    if dtype == "bool":
        return False
    if dtype == "float8_e8m0fnu":
        return "NaN"  # It has no zero.
    return [0.0, 0.0] if dtype.startswith("complex") else 0.0 if "float" in dtype else 0
