"""Encodes messages as JSON, and decodes a peer's JSON into typed messages.

A protocol's messages are subclasses of `Message`; the field "type" distinguishes them and holds the
class's name (a class that is renamed keeps its old name on the wire with `tag="OldName"`). Their
fields may be numbers, strings, enums, tuples, mappings with string keys, and frozen dataclasses.
Floats must be finite: JSON has no other, and msgspec encodes them as null.

Promises: `decode` returns a message whose fields have the declared types, or raises
MalformedMessage; it raises nothing else, whatever the bytes are. Fields that this version does not
know are ignored, so that a newer peer may add fields that have defaults.
"""

from __future__ import annotations

from typing import Generic, TypeAlias, TypeVar, Union

import msgspec

from keepstep.transport.errors import MalformedMessage, quote

Buffer: TypeAlias = bytes | bytearray | memoryview


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """Base of all messages. Subclasses add fields; all of them are keyword-only."""


MessageT = TypeVar("MessageT", bound=Message)


class _Tag(msgspec.Struct):
    """The part of a message that is read to name it in an error."""

    type: str = "message"


class Codec(Generic[MessageT]):
    """Encodes and decodes one direction's messages of a protocol.

    Args:
        types: every message class of that direction. `Codec[Begin | Seal](Begin, Seal)` types it.
    """

    def __init__(self, *types: type[MessageT]) -> None:
        if not types:
            raise ValueError("a codec needs at least one message type")
        self.types = types
        self._encoder = msgspec.json.Encoder()
        self._decoder: msgspec.json.Decoder[MessageT] = msgspec.json.Decoder(
            Union[types]  # noqa: UP007 - the types are known at run time only
        )
        self._tag_decoder = msgspec.json.Decoder(_Tag)

    def encode(self, message: MessageT) -> bytes:
        """Return a message as JSON.

        Raises:
            TypeError: the message is none of this codec's, or a field cannot be encoded.
        """
        if type(message) not in self.types:
            raise TypeError(f"{type(message).__name__} is not sent in this direction")
        return self._encoder.encode(message)

    def decode(self, body: Buffer, peer: str) -> MessageT:
        """Return the message that a peer sent.

        Args:
            body: the JSON as received.
            peer: the sender's name in errors.

        Raises:
            MalformedMessage: the bytes are no JSON, or no message of this codec.
        """
        try:
            return self._decoder.decode(body)
        # RecursionError: nesting deeper than the interpreter's stack allows.
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            raise self._explain(error, body, peer) from error

    def _explain(self, error: Exception, body: Buffer, peer: str) -> MalformedMessage:
        if not isinstance(error, msgspec.ValidationError):
            return MalformedMessage(f"{peer}: what it sent is no JSON message: {quote(str(error))}")
        # msgspec ends its text with the place: "Expected `int`, got `str` - at `$.snapshot.step`".
        reason, separator, place = str(error).rpartition(" - at ")
        if not separator:
            reason, place = place, ""
        path = quote(place.strip("`").removeprefix("$"))
        if path == ".type":
            return MalformedMessage(
                f"{peer}: sent a message whose type this side does not know: {quote(reason)}; "
                f"run compatible versions of keepstep on all nodes",
                "type",
            )
        field = self._name_of(body) + path
        return MalformedMessage(
            f"{peer}: sent {field} that does not fit: {quote(reason)}; "
            f"run compatible versions of keepstep on all nodes",
            field,
        )

    def _name_of(self, body: Buffer) -> str:
        try:
            return quote(self._tag_decoder.decode(body).type)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return "message"
