"""Builds etcd's messages and services from the descriptors in the `etcd3` package.

The package's generated code itself is too old for the fast implementation of protobuf: importing it
needs the one in pure Python, for the whole process. So it is not imported. Each of its modules has
its descriptors as one literal, which is read here and loaded into a pool of its own: other code of
the process may use `etcd3`, or other messages of the same names.

`kv`, `auth` and `rpc` have the messages of the files of these names.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from keepstep.elastic.errors import UsageError


def stub(name: str, channel: Any) -> Any:
    """Return a service on a gRPC channel: its methods by name.

    Args:
        name: such as `etcdserverpb.KV`.
        channel: of gRPC for asyncio.
    """
    service = _POOL.FindServiceByName(name)
    return SimpleNamespace(
        **{method.name: _callable(channel, service.full_name, method) for method in service.methods}
    )


def _callable(channel: Any, service: str, method: Any) -> Any:
    kinds: dict[tuple[bool, bool], Callable[..., Any]] = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    return kinds[method.client_streaming, method.server_streaming](
        f"/{service}/{method.name}",
        request_serializer=GetMessageClass(method.input_type).SerializeToString,
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )


def _read_descriptors(module: str) -> bytes:
    """Return the descriptors of one file of etcd's interface, serialized.

    Raises:
        UsageError: the installed package does not have them in the form of version 0.12.
    """
    # Only the outermost package is located: that imports nothing.
    spec = importlib.util.find_spec("etcd3")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        path = Path(folder, "etcdrpc", f"{module}.py")
        if path.exists():
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.keyword) and node.arg == "serialized_pb":
                    literals = [p for p in ast.walk(node.value) if isinstance(p, ast.Constant)]
                    if len(literals) == 1 and isinstance(literals[0].value, str):
                        return literals[0].value.encode("latin1")
    raise UsageError(
        f"the installed package etcd3 has no descriptors in etcdrpc/{module}.py; "
        "install version 0.12 of it"
    )


def _messages(module: str) -> SimpleNamespace:
    """Load a file of etcd's interface; return the classes of its messages by name."""
    file = _POOL.AddSerializedFile(_read_descriptors(module))
    return SimpleNamespace(
        **{name: GetMessageClass(kind) for name, kind in file.message_types_by_name.items()}
    )


_POOL = DescriptorPool()
# Each file comes after those whose messages it uses.
kv = _messages("kv_pb2")
auth = _messages("auth_pb2")
rpc = _messages("rpc_pb2")
