"""The parts of folders of DCP, against what PyTorch itself writes and reads."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from keepstep.checkpoint.convert.write.dcp_metadata_writer import (
    EntryPlace,
    WrittenChunk,
    WrittenTensor,
    WrittenValue,
    metadata_file,
    tensor_entry,
    value_entry,
)
from keepstep.checkpoint.convert.write.pieces_of_files import StoredTensor
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.source import TensorSpec
from keepstep.checkpoint.live.tensors import dtype_name

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def stored(tensor: torch.Tensor) -> StoredTensor:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return StoredTensor(dtype_name(tensor.dtype), tuple(tensor.shape), (data,))


def entry_of(tensor: torch.Tensor) -> bytes:
    entry = tensor_entry(stored(tensor))
    assert all(isinstance(piece, bytes) for piece in entry)
    return b"".join(piece for piece in entry if isinstance(piece, bytes))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(4, 3),
        torch.arange(7).bfloat16(),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.arange(8.0).to(torch.float8_e4m3fn),
        torch.tensor([1, 2, 3], dtype=torch.uint16),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_an_entry_is_the_file_that_torch_save_makes_but_for_checksums(tensor: torch.Tensor) -> None:
    theirs = io.BytesIO()
    torch.save(tensor, theirs)
    ours = entry_of(tensor)
    assert len(ours) == len(theirs.getvalue())
    back = torch.load(io.BytesIO(ours), weights_only=True)
    assert (back.dtype, back.shape, back.is_contiguous()) == (tensor.dtype, tensor.shape, True)
    assert stored(back).pieces == stored(tensor).pieces


def test_an_entry_may_have_the_elements_of_the_transpose() -> None:
    tensor = torch.arange(12.0).reshape(4, 3)
    given = StoredTensor("float32", (3, 4), stored(tensor).pieces)
    entry = tensor_entry(given, is_transposed=True)
    data = b"".join(piece for piece in entry if isinstance(piece, bytes))
    assert torch.equal(torch.load(io.BytesIO(data), weights_only=True), tensor.t())


def test_pytorch_loads_chunks_of_several_files_by_the_metadata(tmp_path: Path) -> None:
    tensor = torch.arange(20.0).reshape(5, 4)
    first, second = entry_of(tensor[:3]), entry_of(tensor[3:])
    note = value_entry({"a": [1, "b"]})
    (tmp_path / "__0_0.distcp").write_bytes(first + note)
    (tmp_path / "__0_1.distcp").write_bytes(second)
    chunks = (
        WrittenChunk(Box((0, 0), (3, 4)), EntryPlace("__0_0.distcp", 0, len(first))),
        WrittenChunk(Box((3, 0), (2, 4)), EntryPlace("__0_1.distcp", 0, len(second))),
    )
    spec = TensorSpec("float32", (5, 4))
    metadata = metadata_file(
        [WrittenTensor("model.a.b", ("model", "a.b"), spec, chunks)],
        [WrittenValue("note", ("note",), EntryPlace("__0_0.distcp", len(first), len(note)))],
    )
    (tmp_path / ".metadata").write_bytes(metadata)
    state = {"model": {"a.b": torch.zeros(5, 4)}, "note": None}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(state["model"]["a.b"], tensor)  # type: ignore[index]
    assert state["note"] == {"a": [1, "b"]}
