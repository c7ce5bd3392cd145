"""Reads the `.metadata` file of PyTorch's DCP: the tensors and values, and where each lies.

It is a pickle of dataclasses, which are read as what they contain. The bytes of every chunk of a
tensor, and of every other value, are a complete file of `torch.save` in a range of one of the
`.distcp` files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keepstep.checkpoint.convert.read.files import Extent, ForeignFiles, damaged
from keepstep.checkpoint.convert.read.pickled_tensors import dtype_name, torch_constructors
from keepstep.checkpoint.convert.read.pickled_values import Global, Record
from keepstep.checkpoint.convert.read.pickles import MOST_NBYTES, unpickle
from keepstep.checkpoint.convert.read.safe_repr import safe_repr
from keepstep.checkpoint.errors import CheckpointDamaged, FormatUnsupported
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.source import TensorSpec

METADATA = ".metadata"

Path = tuple[str | int, ...]
"""Where a value is in the state that was saved: keys of mappings, and indices of lists."""

# PyTorch's class, and the one that Megatron-Core had in its place in release 0.15.
_CLASSES = (".Metadata", ".MCoreMetadata")
_MOST_EXTENT = 2**60
_MOST_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and the range of a file that has it."""

    box: Box
    stored: Extent


@dataclass(frozen=True, slots=True)
class ChunkedTensor:
    """A tensor and its chunks that have elements; replicas are among them if they were written."""

    spec: TensorSpec
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """The content of a `.metadata` file.

    Attributes:
        tensors: tensors by flat name.
        values: where values other than tensors are, by flat name.
        unsupported: the data types of tensors that cannot be stored, by flat name.
        unexplained: flat names of entries in the files that are not described.
        file_names: the files that have any of these.
        paths: paths of the flat names; empty if the planner noted none, as Megatron-Core's.
    """

    tensors: Mapping[str, ChunkedTensor]
    values: Mapping[str, Extent]
    unsupported: Mapping[str, str]
    unexplained: tuple[str, ...]
    file_names: frozenset[str]
    paths: Mapping[str, Path]


def read_metadata(files: ForeignFiles) -> Metadata:
    """Return what the folder's `.metadata` says, once its ranges are shown to be in the files.

    Raises:
        CheckpointMissing: it, or a file that it names, is not there.
        CheckpointDamaged: it contradicts itself or the files' sizes.
        FormatUnsupported: its entries went through transforms, such as compression.
    """
    return _Reading(files).metadata()


class _Reading:
    """One `.metadata` file while it is read."""

    def __init__(self, files: ForeignFiles) -> None:
        self._files = files
        self._location = f"{files.url}/{METADATA}"
        self._wholes: dict[str, Extent] = {}

    def metadata(self) -> Metadata:
        data = self._files.file(METADATA).whole.read(MOST_NBYTES)
        value, _ = unpickle(data, self._location, torch_constructors())
        if not isinstance(value, Record) or not value.name.endswith(_CLASSES):
            raise self._damaged("its pickle has no Metadata of DCP")
        described = self._mapping(value, "state_dict_metadata")
        stored = self._stored(self._mapping(value, "storage_data"))
        tensors: dict[str, ChunkedTensor] = {}
        values: dict[str, Extent] = {}
        unsupported: dict[str, str] = {}
        for name, description in described.items():
            kind = description.name if isinstance(description, Record) else ""
            if not isinstance(name, str):
                raise self._damaged("the name of a tensor or value is no text")
            if kind.endswith(".BytesStorageMetadata"):
                values[name] = self._place(stored, name, None)
            elif not kind.endswith(".TensorStorageMetadata"):
                raise self._damaged(f"{name} is described by what is no tensor and no value")
            elif (dtype := self._dtype(description.attributes)) is None:
                unsupported[name] = self._dtype_text(description.attributes)
            else:
                tensors[name] = self._tensor(name, dtype, description.attributes, stored)
        return Metadata(
            tensors=tensors,
            values=values,
            unsupported=unsupported,
            unexplained=tuple(name for name in stored if name not in described),
            file_names=frozenset(self._wholes),
            paths=self._paths(value.attributes.get("planner_data")),
        )

    def _tensor(
        self,
        name: str,
        dtype: str,
        description: Mapping[str, Any],
        stored: Mapping[str, Mapping[Any, Extent]],
    ) -> ChunkedTensor:
        shape = self._numbers(name, description.get("size"))
        chunks = []
        listed = description.get("chunks")
        if not isinstance(listed, list):
            raise self._damaged(f"{name} has no list of chunks")
        for chunk in listed:
            place = chunk.attributes if isinstance(chunk, Record) else {}
            offset = self._numbers(name, place.get("offsets"))
            extents = self._numbers(name, place.get("sizes"))
            if len(offset) != len(shape) or len(extents) != len(shape):
                raise self._damaged(
                    f"a chunk of {name} at {offset} has sizes {extents}, and the tensor {shape}"
                )
            # Ranks beyond the last row write chunks without elements, which may share an offset.
            if 0 not in extents:
                chunks.append(Chunk(Box(offset, extents), self._place(stored, name, offset)))
        return ChunkedTensor(TensorSpec(dtype, shape), tuple(chunks))

    def _stored(self, storage_data: Mapping[Any, Any]) -> dict[str, dict[Any, Extent]]:
        """Return the ranges by flat name and chunk's offset, which is None for values."""
        ranges: dict[str, dict[Any, Extent]] = {}
        for index, info in storage_data.items():
            key = index.attributes if isinstance(index, Record) else {}
            name, offset = key.get("fqn"), key.get("offset")
            place = info.attributes if isinstance(info, Record) else {}
            file_name = place.get("relative_path")
            start, nbytes = place.get("offset"), place.get("length")
            if (
                not isinstance(name, str)
                or not isinstance(file_name, str)
                or type(start) is not int
                or type(nbytes) is not int
            ):
                raise self._damaged("it does not say where one of its entries is")
            transforms = place.get("transform_descriptors")
            if transforms:
                raise FormatUnsupported(
                    f"{self._location}: {name} went through {safe_repr(transforms)}; save it "
                    "without extensions of the storage writer"
                )
            place_in_tensor = None if offset is None else self._numbers(name, offset)
            found = self._range(name, file_name, start, nbytes)
            ranges.setdefault(name, {})[place_in_tensor] = found
        return ranges

    def _range(self, name: str, file_name: str, start: int, nbytes: int) -> Extent:
        whole = self._wholes.get(file_name)
        if whole is None:
            whole = self._wholes[file_name] = self._files.file(file_name).whole
        if start < 0 or nbytes <= 0 or start + nbytes > whole.nbytes:
            raise self._damaged(
                f"{name} has {nbytes} bytes from {start} on in {file_name}, which has "
                f"{whole.nbytes}"
            )
        return whole.part(start, nbytes)

    def _place(
        self,
        stored: Mapping[str, Mapping[Any, Extent]],
        name: str,
        offset: tuple[int, ...] | None,
    ) -> Extent:
        ranges = stored.get(name, {})
        found = ranges.get(offset)
        if found is None:
            what = name if offset is None else f"the chunk of {name} at {offset}"
            raise self._damaged(f"it does not say which file has {what}")
        return found

    def _paths(self, planner_data: object) -> dict[str, Path]:
        if not isinstance(planner_data, dict):
            return {}
        paths: dict[str, Path] = {}
        for name, path in planner_data.items():
            if not (
                isinstance(name, str)
                and isinstance(path, tuple)
                and 0 < len(path) <= _MOST_DEPTH
                and isinstance(path[0], str)
                and all(isinstance(part, str) or type(part) is int for part in path)
            ):
                raise self._damaged("its planner_data are not paths by flat names")
            paths[name] = path
        return paths

    def _dtype(self, description: Mapping[str, Any]) -> str | None:
        return dtype_name(_properties_dtype(description))

    def _dtype_text(self, description: Mapping[str, Any]) -> str:
        dtype = _properties_dtype(description)
        if not isinstance(dtype, Global):
            raise self._damaged("a tensor's properties have no data type")
        return dtype.name

    def _mapping(self, value: Record, attribute: str) -> Mapping[Any, Any]:
        found = value.attributes.get(attribute)
        if not isinstance(found, dict):
            raise self._damaged(f"it has no {attribute}")
        return found

    def _numbers(self, name: str, value: object) -> tuple[int, ...]:
        if not isinstance(value, Sequence) or any(
            type(number) is not int or not 0 <= number <= _MOST_EXTENT for number in value
        ):
            raise self._damaged(f"a shape or offset of {name} is no tuple of numbers")
        return tuple(value)

    def _damaged(self, contradiction: str) -> CheckpointDamaged:
        return damaged(self._location, contradiction)


def _properties_dtype(description: Mapping[str, Any]) -> object:
    properties = description.get("properties")
    state = properties.state if isinstance(properties, Record) else None
    if isinstance(state, tuple) and state:
        return state[0]
    return state.get("dtype") if isinstance(state, dict) else None
