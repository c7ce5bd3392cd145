"""Claims about messages: what is decoded has its declared types, and nothing else is raised."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.transport import Codec, MalformedMessage, Message
from tests.unit.transport.example_protocol import (
    ASK,
    REPLIES,
    REQUESTS,
    Ask,
    Color,
    Fail,
    Place,
    Tell,
)


def test_dataclasses_enums_tuples_and_mappings_survive_a_round_trip():
    decoded = REQUESTS.decode(REQUESTS.encode(ASK), "peer")
    assert decoded == ASK
    assert isinstance(decoded.place, Place)
    assert decoded.color is Color.BLUE


@given(st.text(), st.integers(-(2**63), 2**63 - 1))
def test_any_text_and_number_survives_a_round_trip(text: str, nbytes: int):
    text = text.encode(errors="replace").decode()
    message = Tell(text=text, nbytes=nbytes)
    assert REPLIES.decode(REPLIES.encode(message), "peer") == message


def test_unknown_fields_of_a_newer_version_are_ignored():
    body = b'{"type":"Ask","place":{"step":1,"since":[1,{}]},"priority":"high"}'
    assert REQUESTS.decode(body, "peer") == Ask(place=Place(1))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"type":"Ask","place":{"step":"one"}}', "Ask.place.step"),
        (b'{"type":"Ask","place":{"step":-1}}', "Ask.place"),
        (b'{"type":"Ask","place":{"step":1,"shape":[1,null]}}', "Ask.place.shape[1]"),
        (b'{"type":"Ask","place":{"step":1},"color":"green"}', "Ask.color"),
        (b'{"type":"Ask"}', "Ask"),
        (b'{"type":"Forget"}', "type"),
        (b"[1]", "message"),
    ],
)
def test_the_error_names_the_peer_and_the_field(body: bytes, field: str):
    with pytest.raises(MalformedMessage, match="node b") as caught:
        REQUESTS.decode(body, "node b")
    assert caught.value.field == field
    assert field in str(caught.value)


def test_text_of_a_peer_is_printable_and_short_in_errors():
    body = json.dumps({"type": "\x1b[31m" + "x" * 10_000}).encode()
    with pytest.raises(MalformedMessage) as caught:
        REQUESTS.decode(body, "node b")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@given(st.binary())
def test_arbitrary_bytes_raise_nothing_but_malformed_message(body: bytes):
    with pytest.raises(MalformedMessage):
        REQUESTS.decode(body, "peer")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["Ask", "Tell"])},
        optional={"place": _JSON, "color": _JSON, "sizes": _JSON},
    )
)
def test_arbitrary_fields_give_a_typed_message_or_malformed_message(value: object):
    try:
        message = REQUESTS.decode(json.dumps(value).encode(), "peer")
    except MalformedMessage:
        return
    assert isinstance(message.place, Place)


@pytest.mark.parametrize("depth", [1000, 100_000])
def test_deep_nesting_is_malformed(depth: int):
    with pytest.raises(MalformedMessage):
        REQUESTS.decode(b'{"type":"Ask","new":' + b"[" * depth, "peer")


def test_a_message_of_the_other_direction_is_neither_sent_nor_accepted():
    with pytest.raises(TypeError, match="Fail"):
        REQUESTS.encode(Fail(reason="no"))  # type: ignore[arg-type]
    with pytest.raises(MalformedMessage, match="Fail"):
        REQUESTS.decode(REPLIES.encode(Fail(reason="no")), "peer")


def test_a_renamed_message_keeps_its_tag():
    class Renamed(Message, tag="Ask"):
        place: Place

    assert Codec[Renamed](Renamed).decode(REQUESTS.encode(ASK), "peer").place == ASK.place


def test_messages_are_immutable():
    with pytest.raises(AttributeError):
        ASK.color = Color.RED  # type: ignore[misc]
    assert msgspec.structs.replace(ASK, color=Color.RED).color is Color.RED
