"""Claims about the messages of every protocol: whatever a peer sends is one, or is malformed."""

from __future__ import annotations

import tracemalloc
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.saving.messages import WRITER_PROTOCOL
from keepstep.checkpoint.snapshot.memory.messages import CONTROL_PROTOCOL, SNAPSHOT_PROTOCOL
from keepstep.elastic.agent.peer_connections import PROTOCOL as AGENT_PROTOCOL
from keepstep.elastic.worker.fork_messages import FORK_PROTOCOL
from keepstep.elastic.worker.messages import PROTOCOL as WORKER_PROTOCOL
from keepstep.monitor.preflight.messages import PROTOCOL as DOCTOR_PROTOCOL
from keepstep.transport import Codec, MalformedMessage, Message

PROTOCOLS = (
    AGENT_PROTOCOL, CONTROL_PROTOCOL, DOCTOR_PROTOCOL, FORK_PROTOCOL, SNAPSHOT_PROTOCOL,
    WORKER_PROTOCOL, WRITER_PROTOCOL,
)  # fmt: skip
CODECS: dict[str, Codec[Any]] = {
    f"{protocol.name}-{name}": codec
    for protocol in PROTOCOLS
    for name, codec in (("requests", protocol.requests), ("replies", protocol.replies))
}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def field_names(codec: Codec[Any]) -> list[str]:
    """Return the names of the fields of all messages, and of what they consist of."""
    names: set[str] = set()
    schemas, components = msgspec.json.schema_components(codec.types)
    for schema in (*schemas, *components.values()):
        names.update(schema.get("properties", {}))
    return sorted(names)


@cache
def bodies(codec: Codec[Any]) -> st.SearchStrategy[bytes]:
    tags = [kind.__name__ for kind in codec.types]
    names = st.sampled_from(field_names(codec))
    fields = st.dictionaries(names, JSON | st.dictionaries(names, JSON, max_size=6), max_size=6)
    messages = st.builds(lambda tag, rest: {**rest, "type": tag}, st.sampled_from(tags), fields)
    return st.binary(max_size=60) | messages.map(lambda message: msgspec.json.encode(message))


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
@given(data=st.data())
def test_arbitrary_bodies_are_messages_or_malformed(codec: Codec[Any], data: st.DataObject) -> None:
    try:
        message = codec.decode(data.draw(bodies(codec)), "peer")
    except MalformedMessage:
        return
    assert isinstance(message, Message)
    assert codec.decode(codec.encode(message), "peer") == message


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
def test_deep_nesting_is_malformed_and_takes_little_memory(codec: Codec[Any]) -> None:
    for kind in codec.types:
        body = b'{"type":"' + kind.__name__.encode() + b'","new":' + b"[" * 100_000
        tracemalloc.start()
        try:
            with pytest.raises(MalformedMessage):
                codec.decode(body, "peer")
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()
