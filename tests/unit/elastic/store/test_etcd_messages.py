"""Claims about the messages of etcd's interface: how they are found and encoded."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from keepstep.elastic.errors import UsageError
from keepstep.elastic.store import etcd_messages
from keepstep.elastic.store.etcd_messages import kv, rpc


def test_messages_are_encoded_as_etcd_expects() -> None:
    put = rpc.PutRequest(key=b"a", value=b"bc", lease=3)
    # By etcd's rpc.proto: fields 1 and 2 are bytes, 3 is a varint; of the operation, 2 is a put.
    assert put.SerializeToString() == b"\x0a\x01a\x12\x02bc\x18\x03"
    assert rpc.RequestOp(request_put=put).SerializeToString() == b"\x12\x09" + (
        put.SerializeToString()
    )
    event = kv.Event.FromString(b"\x08\x01")
    assert event.type == kv.Event.DELETE


def test_the_protobuf_that_the_process_has_is_used_whatever_was_imported_before() -> None:
    """The generated code of etcd3 needed the one in pure Python, chosen before any other import."""
    code = (
        "from google.protobuf import descriptor_pb2\n"
        "from google.protobuf.internal import api_implementation\n"
        "import keepstep.elastic.store.etcd, sys\n"
        "assert 'etcd3' not in sys.modules\n"
        "print(api_implementation.Type())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "upb"


@pytest.mark.parametrize(
    "text",
    [None, "DESCRIPTOR = None", "DESCRIPTOR = File(serialized_pb=b'x')"],
    ids=["no file", "no descriptors", "another form"],
)
def test_a_package_without_the_descriptors_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "etcdrpc").mkdir()
        (tmp_path / "etcdrpc" / "kv_pb2.py").write_text(text)
    spec = ModuleSpec("etcd3", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    with pytest.raises(UsageError, match=r"etcdrpc/kv_pb2\.py; install version 0\.12"):
        etcd_messages._read_descriptors("kv_pb2")
