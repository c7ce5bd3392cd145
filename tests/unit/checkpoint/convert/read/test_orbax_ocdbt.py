"""Stores that TensorStore writes are read as it reads them; what it never writes is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import crc32c
import pytest
import tensorstore
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.convert.read.files import open_files
from keepstep.checkpoint.convert.read.orbax_ocdbt import read_ocdbt
from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointMissing

KEYS = st.text("ab/.0é", min_size=1, max_size=9)
VALUES = st.binary(max_size=80)
COMMITS = st.lists(st.dictionaries(KEYS, st.none() | VALUES, max_size=30), min_size=1, max_size=4)


def write(root: Path, commits: list[dict[str, bytes | None]], **config: Any) -> dict[str, bytes]:
    """Write a store by some commits; return what it then has."""
    store = tensorstore.KvStore.open(
        {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{root}/"},
            "config": {"max_inline_value_bytes": 20, **config},
        }
    ).result()
    for commit in commits:
        transaction = tensorstore.Transaction()
        for key, value in commit.items():
            store.with_transaction(transaction).write(key, value).result()
        transaction.commit_async().result()
    return {key.decode(): bytes(store.read(key).result().value) for key in store.list().result()}


def read(root: Path) -> dict[str, bytes]:
    return {key: value.read() for key, value in read_ocdbt(open_files(str(root))).items()}


@given(
    COMMITS,
    st.sampled_from([None, {"id": "zstd", "level": 1}]),
    st.sampled_from([1, 200, 2**20]),
    st.sampled_from(["single", "numbered"]),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_tensorstore_has_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    commits: list[dict[str, bytes | None]],
    compression: Any,
    node_nbytes: int,
    kind: str,
) -> None:
    root = tmp_path_factory.mktemp("store")
    written = write(
        root, commits,
        compression=compression, max_decoded_node_bytes=node_nbytes, manifest_kind=kind,
    )  # fmt: skip
    if (root / "manifest.ocdbt").exists():
        assert read(root) == written
    else:
        assert not written


def test_a_tree_of_several_levels_is_read(tmp_path: Path) -> None:
    commit = {f"layers.{n}.weight/0.{n % 7}": bytes([n % 256]) * (n % 50) for n in range(900)}
    written = write(tmp_path, [commit], max_decoded_node_bytes=300)
    assert read(tmp_path) == written == commit


def sealed(content: bytes) -> bytes:
    """Return a manifest or node with the size and the checksum that its bytes need."""
    content = content[:4] + (len(content) + 4).to_bytes(8, "little") + content[12:]
    return content + crc32c.crc32c(content).to_bytes(4, "little")


def manifest(path: bytes, offset: bytes, nbytes: bytes, height: int = 0) -> bytes:
    """Return a manifest of one version, whose root is in a file."""
    config = bytes(16) + b"\0" + b"\x80\x01" + b"\x80\x01" + b"\4" + b"\0"
    files = b"\1" + bytes([len(path)]) + b"\0" + path
    versions = b"\1" + b"\1" + bytes([height]) + b"\0" + offset + nbytes + b"\0\0\0" + bytes(8)
    return sealed(
        bytes.fromhex("0cdb3a2a") + bytes(8) + b"\0\0" + config + files + versions + b"\0"
    )


def leaf(entries: bytes, files: bytes = b"\0") -> bytes:
    return sealed(bytes.fromhex("0cdb20de") + bytes(8) + b"\0\0" + b"\0" + files + entries)


def varint(value: int) -> bytes:
    digits = b""
    while value >= 0x80:
        digits += bytes([value & 0x7F | 0x80])
        value >>= 7
    return digits + bytes([value])


def store_of(root: Path, node: bytes, **more: Any) -> Path:
    (root / "node").write_bytes(node)
    content = manifest(b"node", b"\0", varint(len(node)), **more)
    (root / "manifest.ocdbt").write_bytes(content)
    return root


ONE = b"\1" + b"\1" + b"k" + b"\2" + b"\0" + b"vw"


def test_a_store_made_by_hand_is_read(tmp_path: Path) -> None:
    assert read(store_of(tmp_path, leaf(ONE))) == {"k": b"vw"}


def interior(child: bytes, height: int) -> bytes:
    """Return a node above itself, which it refers to in its own file."""
    files = b"\1\4\0node"
    body = bytes([height]) + files + b"\1" + b"\1" + b"\0" + b"k" + child + b"\0\0\0"
    return sealed(bytes.fromhex("0cdb20de") + bytes(8) + b"\0\0" + body)


HOSTILE_NODES = {
    "counts": leaf(varint(2**40)),
    "sizes": leaf(b"\1" + b"\1" + b"k" + varint(2**50) + b"\0"),
    "a value outside": leaf(b"\1" + b"\1" + b"k" + b"\2" + b"\1" + b"\0" + varint(2**60),
                            b"\1\4\0node"),
    "another value's bytes": leaf(
        b"\2" + b"\0" + b"\1\1" + b"ab" + b"\4\4" + b"\1\1" + b"\0\0" + b"\0\2", b"\1\4\0node"
    ),
    "a file that is not there": leaf(b"\1" + b"\1" + b"k" + b"\2" + b"\1" + b"\7" + b"\0",
                                     b"\1\4\0node"),
    "order": leaf(b"\2" + b"\0" + b"\1\1" + b"ba" + b"\0\0" + b"\0\0"),
    "shared bytes": leaf(b"\2" + b"\5" + b"\1\1" + b"ab" + b"\0\0" + b"\0\0"),
    "a number without end": leaf(b"\x80" * 20),
    "a kind": leaf(b"\1" + b"\1" + b"k" + b"\2" + b"\7" + b"vw"),
    "more": leaf(ONE + b"more"),
    "nothing": leaf(b"\0"),
    "no text": leaf(b"\1" + b"\1" + b"\xff" + b"\2" + b"\0" + b"vw"),
    "bytes": b"no node" * 9,
    "checksum": leaf(ONE)[:-1] + b"!",
    "cut": leaf(ONE)[:9],
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_NODES)
def test_hostile_node_is_refused_by_its_file(tmp_path: Path, name: str) -> None:
    root = store_of(tmp_path, HOSTILE_NODES[name])
    with pytest.raises(CheckpointDamaged, match=f"{root}/node"):
        read(root)


@pytest.mark.parametrize("path", [b"../outside", b"/etc/passwd", b"d/../../outside", b"a\0b"])
def test_no_path_in_a_store_leads_out_of_it(tmp_path: Path, path: bytes) -> None:
    root = tmp_path / "store"
    root.mkdir()
    (tmp_path / "outside").write_bytes(leaf(ONE))
    content = manifest(path, b"\0", varint(len(leaf(ONE))))
    (root / "manifest.ocdbt").write_bytes(content)
    with pytest.raises(CheckpointMissing, match="there is no file"):
        read(root)


def test_a_node_that_leads_to_itself_is_refused(tmp_path: Path) -> None:
    length = len(interior(b"\0\0\x50", 9))
    node = interior(b"\0\0" + varint(length), 9)
    with pytest.raises(CheckpointDamaged, match="a node twice"):
        read(store_of(tmp_path, node, height=9))
    with pytest.raises(CheckpointDamaged, match="of height 9 is where one of 3 belongs"):
        read(store_of(tmp_path, node, height=3))


def test_manifests_that_refer_to_others_without_end_are_refused(tmp_path: Path) -> None:
    numbered = sealed(bytes.fromhex("0cdb3a2a") + bytes(8) + b"\0\0" + bytes(16) + b"\1\1\1\4\0")
    (tmp_path / "manifest.ocdbt").write_bytes(numbered)
    with pytest.raises(CheckpointDamaged, match="there is none"):
        read(tmp_path)
    (tmp_path / f"manifest.{'0' * 16}").write_bytes(numbered)
    with pytest.raises(CheckpointDamaged, match="numbered manifests"):
        read(tmp_path)
