"""OCDBT stores that TensorStore writes are read; damaged and hostile ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import crc32c
import pytest
import tensorstore

from keepstep.checkpoint.convert.read.files import open_files
from keepstep.checkpoint.convert.read.orbax_arrays import OrbaxArrays
from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointMissing


def names_in(root: Path) -> list[str]:
    """Return the arrays of a store, of which the tree's metadata names none."""
    arrays = OrbaxArrays(
        open_files(str(root)), frozenset(), is_ocdbt=True, is_v3=False, stores_all=True
    )
    return list(arrays.unnamed())


@pytest.mark.parametrize("kind", ["single", "numbered"])
def test_a_tree_of_several_levels_is_read(tmp_path: Path, kind: str) -> None:
    names = [f"layers.{n}.weight" for n in range(900)]
    store = tensorstore.KvStore.open(
        {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{tmp_path}/"},
            "config": {"max_decoded_node_bytes": 300, "manifest_kind": kind},
        }
    ).result()
    for half in (names[:450], names[450:]):
        transaction = tensorstore.Transaction()
        for name in half:
            store.with_transaction(transaction).write(f"{name}/.zarray", b"{}").result()
        transaction.commit_async().result()
    assert names_in(tmp_path) == sorted(names)
    store.delete_range(tensorstore.KvStore.KeyRange()).result()
    assert names_in(tmp_path) == []


def sealed(content: bytes) -> bytes:
    """Return a manifest or node with the size and the checksum that its bytes need."""
    content = content[:4] + (len(content) + 4).to_bytes(8, "little") + content[12:]
    return content + crc32c.crc32c(content).to_bytes(4, "little")


def varint(value: int) -> bytes:
    digits = b""
    while value >= 0x80:
        digits += bytes([value & 0x7F | 0x80])
        value >>= 7
    return digits + bytes([value])


def manifest(path: bytes, nbytes: int, height: int = 0) -> bytes:
    """Return a manifest of one version, whose root is at the beginning of a file."""
    config = bytes(16) + b"\0" + b"\x80\x01" + b"\x80\x01" + b"\4" + b"\0"
    files = b"\1" + bytes([len(path)]) + b"\0" + path
    root = b"\1" + b"\1" + bytes([height]) + b"\0" + b"\0" + varint(nbytes)
    versions = root + b"\0\0\0" + bytes(8)
    return sealed(
        bytes.fromhex("0cdb3a2a") + bytes(8) + b"\0\0" + config + files + versions + b"\0"
    )


def node(body: bytes, files: bytes = b"\0", height: int = 0) -> bytes:
    head = bytes.fromhex("0cdb20de") + bytes(8) + b"\0\0"
    return sealed(head + bytes([height]) + files + body)


def store_of(root: Path, content: bytes, **more: Any) -> Path:
    (root / "node").write_bytes(content)
    (root / "manifest.ocdbt").write_bytes(manifest(b"node", len(content), **more))
    return root


KEY = b"k/.zarray"
ONE = b"\1" + bytes([len(KEY)]) + KEY + b"\2" + b"\0" + b"{}"
ELSEWHERE = b"\1" + bytes([len(KEY)]) + KEY + b"\2" + b"\1" + b"\0" + b"\0"


def test_a_store_made_by_hand_is_read(tmp_path: Path) -> None:
    assert names_in(store_of(tmp_path, node(ONE))) == ["k"]


@pytest.mark.parametrize(
    "content",
    [b"no node" * 9, node(ONE)[:-1] + b"!", node(ONE)[:9], node(varint(2**40)), node(ONE + b"m")],
    ids=["bytes", "checksum", "cut", "counts", "more"],
)
def test_a_damaged_node_is_refused_by_its_store(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(CheckpointDamaged, match=f"{tmp_path}.*node"):
        names_in(store_of(tmp_path, content))


@pytest.mark.parametrize("path", [b"../outside", b"/etc/passwd", b"d/../../outside", b"a:b"])
def test_no_path_in_a_store_leads_out_of_it(tmp_path: Path, path: bytes) -> None:
    root = tmp_path / "store"
    root.mkdir()
    (tmp_path / "outside").write_bytes(node(ONE))
    (root / "manifest.ocdbt").write_bytes(manifest(path, len(node(ONE))))
    with pytest.raises((CheckpointDamaged, CheckpointMissing), match=str(root)):
        names_in(root)


def test_a_value_in_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMissing, match="there is no file 'data'"):
        names_in(store_of(tmp_path, node(ELSEWHERE, b"\1\4\0data")))


def test_a_node_that_leads_to_itself_is_refused(tmp_path: Path) -> None:
    def interior(nbytes: int) -> bytes:
        child = b"\0\0" + varint(nbytes)
        return node(b"\1" + b"\1" + b"\0" + b"k" + child + b"\0\0\0", b"\1\4\0node", height=9)

    content = interior(len(interior(80)))
    with pytest.raises(CheckpointDamaged, match="twice"):
        names_in(store_of(tmp_path, content, height=9))


def test_a_manifest_that_refers_to_others_that_are_not_there_is_refused(tmp_path: Path) -> None:
    numbered = sealed(bytes.fromhex("0cdb3a2a") + bytes(8) + b"\0\0" + bytes(16) + b"\1\1\1\4\0")
    (tmp_path / "manifest.ocdbt").write_bytes(numbered)
    with pytest.raises((CheckpointDamaged, CheckpointMissing), match=str(tmp_path)):
        names_in(tmp_path)
