"""Files of `torch.save` are read as they were saved, and hostile ones are refused or inert."""

from __future__ import annotations

import io
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from keepstep.checkpoint.convert.read.arrays import FileArray
from keepstep.checkpoint.convert.read.files import ForeignFile
from keepstep.checkpoint.convert.read.pickled_values import Record
from keepstep.checkpoint.convert.read.torch_file import read_torch_file
from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointError, FormatUnsupported
from keepstep.checkpoint.live.tensors import as_bytes
from tests.unit.checkpoint.convert.read.written import CountedStorage, extent_of

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128", "bfloat16",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip


def saved(value: object, *, legacy: bool = False) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def read(directory: Path, content: bytes) -> Any:
    return read_torch_file(extent_of(directory, content))


def views(legacy: bool) -> dict[str, torch.Tensor]:
    base = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    of_types = {} if legacy else {
        name: base[0, 0].clone().to(getattr(torch, name)) for name in DTYPES
    }  # fmt: skip
    return {
        "base": base,
        "transposed": base.transpose(0, 2),
        "steps": base.flatten()[7:50:3],
        "column": base[:, 1:2, 4],
        "expanded": base[0, 0, 1].expand(2, 3),
        "scalar": base[2, 3, 4],
        "empty": base[:, :0],
        "parameter": nn.Parameter(base[1]),
        "half": base.half()[1],
        "long": base.long()[:, 0],
        **of_types,
    }


@pytest.mark.parametrize("legacy", [False, True])
def test_tensors_are_as_they_were_whatever_their_strides(tmp_path: Path, legacy: bool) -> None:
    state = views(legacy)
    tree = read(tmp_path, saved({"state": state, "step": 3}, legacy=legacy))
    assert tree["step"] == 3
    for name, tensor in state.items():
        array = tree["state"][name]
        assert isinstance(array, FileArray), name
        assert f"torch.{array.dtype}" == str(tensor.dtype)
        assert array.read().tobytes() == bytes(as_bytes(tensor.detach().contiguous())), name
    assert tree["state"]["base"].extent == tree["state"]["transposed"].extent


def test_legacy_file_with_a_long_pickle_is_read(tmp_path: Path) -> None:
    tree = read(tmp_path, saved({"text": "long" * 2**19, "w": torch.arange(3)}, legacy=True))
    assert len(tree["text"]) == 2**21
    assert tree["w"].read().tolist() == [0, 1, 2]


def test_large_and_small_files_are_read_by_few_requests(tmp_path: Path) -> None:
    for count, most in ((3, 1), (200, 220)):
        (tmp_path / "file").write_bytes(saved({n: torch.ones(2**10) for n in range(count)}))
        storage = CountedStorage(str(tmp_path), tmp_path)
        whole = ForeignFile(storage, "file", (tmp_path / "file").stat().st_size).whole
        read_torch_file(whole)
        assert len(storage.reads) <= most


def test_tied_tensors_are_the_same_array(tmp_path: Path) -> None:
    weight = torch.ones(3, 2)
    tree = read(tmp_path, saved({"a": weight, "b": weight, "c": weight[:2], "d": weight.clone()}))
    assert tree["a"] == tree["b"]
    assert len({tree["a"], tree["c"], tree["d"]}) == 3


def test_entry_of_a_file_of_many_is_read(tmp_path: Path) -> None:
    """So DCP stores every tensor: a whole zip in a range of a file."""
    first, second = saved(torch.arange(3)), saved(torch.arange(5))
    whole = extent_of(tmp_path, first + b"padding" + second)
    array = read_torch_file(whole.part(len(first) + 7, len(second)))
    assert isinstance(array, FileArray)
    assert array.read().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_no_plain_tensor_is_a_record(tmp_path: Path) -> None:
    tree = read(
        tmp_path,
        saved({
            "sparse": torch.eye(2).to_sparse(),
            "conjugated": torch.ones(2, dtype=torch.complex64).conj(),
            "half": torch.ones(2, dtype=torch.complex32),
            "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            "device": torch.device("cpu"),
        }),
    )  # fmt: skip
    assert {name: type(value) for name, value in tree.items()} == dict.fromkeys(tree, Record)


def test_what_torch_wrote_when_the_byte_order_was_big_is_refused(tmp_path: Path) -> None:
    content = repacked(
        saved(torch.ones(2)), lambda entries: entries | {"archive/byteorder": b"bigbig"}
    )
    with pytest.raises(FormatUnsupported, match="its byte order is b'bigbig'"):
        read(tmp_path, content)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        import posix

        return (posix.system, ("touch pwned",))


def repacked(content: bytes, change: Callable[[dict[str, bytes]], dict[str, bytes]]) -> bytes:
    """Return the zip with other entries."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in change(entries).items():
            archive.writestr(name, data)
    return buffer.getvalue()


def compressed(content: bytes, name: str) -> bytes:
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as archive,
        zipfile.ZipFile(buffer, "w") as other,
    ):
        for entry in archive.namelist():
            deflated = zipfile.ZIP_DEFLATED if entry == name else zipfile.ZIP_STORED
            other.writestr(entry, archive.read(entry), deflated)
    return buffer.getvalue()


def with_directory(content: bytes, change: Callable[[bytearray, int], None]) -> bytes:
    """Return the zip with a changed directory; `change` gets where its last entry begins."""
    data = bytearray(content)
    change(data, data.rfind(b"PK\x01\x02"))
    return bytes(data)


def _bombed(data: bytearray, at: int) -> None:
    struct.pack_into("<II", data, at + 20, 2**31, 2**31)


def _overlapping(data: bytearray, at: int) -> None:
    first = data.find(b"PK\x01\x02")
    data[at + 42 : at + 46] = struct.pack("<I", struct.unpack_from("<I", data, first + 42)[0] + 4)


def _elsewhere(data: bytearray, at: int) -> None:
    del at
    second = data.find(b"PK\x01\x02", data.find(b"PK\x01\x02") + 1)
    data[second + 42 : second + 46] = struct.pack("<I", 8)


def _another(data: bytearray, at: int) -> None:
    struct.pack_into("<I", data, at + 42, struct.unpack_from("<I", data, at + 42)[0] + 4)


def _last_storage(entries: dict[str, bytes]) -> dict[str, bytes]:
    return dict(sorted(entries.items(), key=lambda item: item[0].endswith("data/0")))


def _encrypted(data: bytearray, at: int) -> None:
    del at
    first = data.find(b"PK\x01\x02")
    data[first + 8] |= 1


PLAIN = saved({"w": torch.ones(100, 10)})
ROOT = "archive/"


def pickled(tensor: bytes) -> bytes:
    """Return a zip whose pickle is other, with a storage of 40 bytes."""
    return repacked(saved(torch.ones(10)), lambda entries: {**entries, f"{ROOT}data.pkl": tensor})


def tensor_pickle(shape: str, strides: str, offset: str = "K\x00", count: str = "K\x0a") -> bytes:
    storage = f"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\n{count}tQ"
    rebuild = "ctorch._utils\n_rebuild_tensor_v2\n"
    return f"{rebuild}({storage}{offset}{shape}{strides}\x89NtR.".encode("latin-1")


HOSTILE = {
    "truncated": (PLAIN[:-30], "directory"),
    "cut short": (PLAIN[: len(PLAIN) // 2], "directory"),
    "size of a bomb": (with_directory(PLAIN, _bombed), "ends behind"),
    "overlapping entries": (with_directory(PLAIN, _overlapping), "within the one before"),
    "entry elsewhere": (with_directory(PLAIN, _elsewhere), "within the one before"),
    "another entry": (with_directory(repacked(PLAIN, _last_storage), _another), "is another"),
    "encrypted": (with_directory(PLAIN, _encrypted), "compressed or encrypted"),
    "compressed pickle": (compressed(PLAIN, f"{ROOT}data.pkl"), "compressed or encrypted"),
    "compressed zeros": (
        compressed(saved(torch.zeros(10**6)), f"{ROOT}data/0"), "compressed or encrypted",
    ),
    "path": (repacked(PLAIN, lambda e: {**e, "archive/../../x": b""}), "leads elsewhere"),
    "absolute path": (repacked(PLAIN, lambda e: {**e, "/x": b""}), "leads elsewhere"),
    "no storage": (
        repacked(PLAIN, lambda e: {n: d for n, d in e.items() if not n.endswith("/0")}),
        "has no entry archive/data/0",
    ),
    "short storage": (
        repacked(PLAIN, lambda e: {**e, f"{ROOT}data/0": bytes(3999)}),
        "a storage of 1000 elements of 4 bytes has 3999 bytes",
    ),
    "two pickles": (repacked(PLAIN, lambda e: {**e, "b/data.pkl": b"N."}), "2 entries data.pkl"),
    "storage by a path": (
        pickled(tensor_pickle("(K\x01t", "(K\x01t").replace(b"V0\n", b"V../data.pkl\n")),
        "has no entry",
    ),
    "absurd shape": (pickled(tensor_pickle("(L99999999999999L\nt", "(K\x01t")), "needs"),
    "huge shape": (pickled(tensor_pickle("(L" + "9" * 900 + "L\nt", "(K\x01t")), "no tensor"),
    "strides": (pickled(tensor_pickle("(K\x02t", "(K\x0at")), "needs 44 bytes"),
    "offset": (pickled(tensor_pickle("(K\x01t", "(K\x01t", "K\x0a")), "needs 44 bytes"),
    "negative": (pickled(tensor_pickle("(K\x01t", "(I-1\nt", "K\x09")), "no tensor"),
    "text as a shape": (pickled(tensor_pickle("Vab\n", "(K\x01t")), "other values"),
    "two sizes": (pickled(tensor_pickle("(K\x01t", "(K\x01t", count="K\x0b")), "11 elements"),
    "nested": (pickled(b"]" * 10**5 + b"a" * (10**5 - 1) + b"."), "nested more"),
    "legacy truncated": (saved({"w": torch.ones(9)}, legacy=True)[:-9], "refers to"),
    "legacy sizes": (
        saved(torch.ones(9), legacy=True).replace(struct.pack("<Q", 9), struct.pack("<Q", 8)),
        "has 8 elements and 9",
    ),
    "legacy storages": (
        re.sub(rb"]q\x00X.{4}\d+q\x01a\.", b"]q\x00]q\x01a.", saved(torch.ones(9), legacy=True)),
        "its list of storages has no or equal names",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    content, reason = HOSTILE[name]
    with pytest.raises(CheckpointError, match=f"{tmp_path}/file.*{reason}"):
        read(tmp_path, content)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_entry_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO(PLAIN)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("archive/data/0", bytes(4000))
    with pytest.raises(CheckpointDamaged, match="two entries 'archive/data/0'"):
        read(tmp_path, buffer.getvalue())


READ = """
import sys
from keepstep.checkpoint.convert.read.files import open_files
from keepstep.checkpoint.convert.read.torch_file import read_torch_file
whole = open_files(sys.argv[1]).file("file").whole
called = []
sys.addaudithook(lambda event, args: called.append((event, args)))
tree = read_torch_file(whole)
array = tree["w"].read()
allowed = ("builtins.id", "open", "os.open", "object.__getattr__")
print([event for event in called if event[0] not in allowed])
# A file that is open already is given to Python's reader by its number.
names = {args[0] for event, args in called if event == "open"} - {3}
print(names)
print(tree["harm"])
sys.exit(any(event[0] not in allowed for event in called) or names != {sys.argv[1]})
"""


@pytest.mark.parametrize("legacy", [False, True])
def test_harmful_file_is_read_without_harm(tmp_path: Path, legacy: bool) -> None:
    """Neither modules nor commands: Python's audit events show only that the file is opened."""
    (tmp_path / "file").write_bytes(saved({"w": torch.ones(2), "harm": Harmful()}, legacy=legacy))
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / "file")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        env={"PYTHONPATH": str(Path(__file__).parents[5])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "name='posix.system', args=('touch pwned',)" in done.stdout
    assert not (tmp_path / "pwned").exists()


def test_files_of_other_kinds_are_told(tmp_path: Path) -> None:
    with pytest.raises(FormatUnsupported, match=r"no file of torch\.save does"):
        read(tmp_path, b"GGUF" + bytes(100))
    with pytest.raises(FormatUnsupported, match=r"0 entries data\.pkl"):
        read(tmp_path, repacked(PLAIN, lambda _: {"a/b.txt": b"text"}))
    script = torch.jit.script(nn.Linear(2, 2))
    buffer = io.BytesIO()
    torch.jit.save(script, buffer)
    with pytest.raises(FormatUnsupported, match="TorchScript"):
        read(tmp_path, buffer.getvalue())


def test_text_of_python2_is_read(tmp_path: Path) -> None:
    """A file of the legacy format in which text was written by Python 2."""
    content = saved({"w": torch.ones(2)}, legacy=True)
    old = content.replace(b"X\x01\x00\x00\x00w", b"U\x01w")
    assert old != content
    assert read(tmp_path, old)["w"].read().tolist() == [1, 1]
