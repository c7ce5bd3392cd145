"""The other bytes from outside: messages, frames, summaries, rings, records, and rule files.

Each entry is a decoder, the errors that it may raise, and samples of what it decodes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from keepstep.checkpoint.convert.rules.rule_file import parse_rules
from keepstep.checkpoint.errors import RulesInvalid, SnapshotUnavailable
from keepstep.checkpoint.saving import messages as saving_messages
from keepstep.checkpoint.snapshot.memory import messages as memory_messages
from keepstep.checkpoint.snapshot.memory.client import read_index
from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous import records
from keepstep.elastic.rendezvous.records import Record, decode_secret
from keepstep.elastic.rendezvous.view import Keys, from_listing
from keepstep.elastic.store.contract import KeyValue, Listing
from keepstep.elastic.worker import messages as worker_messages
from keepstep.monitor.errors import ProtocolViolation, RingUnreadable
from keepstep.monitor.preflight import messages as preflight_messages
from keepstep.monitor.records import Communicator
from keepstep.monitor.telemetry.ring import Ring
from keepstep.monitor.telemetry.ring_reader import RingReader
from keepstep.monitor.tree.monitor_client import parse_object
from keepstep.monitor.tree.node_clocks import decode_clocks
from keepstep.monitor.tree.summary import decode as decode_summary
from keepstep.monitor.tree.summary import encode as encode_summary
from keepstep.transport import TransportError
from keepstep.transport.codec import Codec
from keepstep.transport.frames import FrameOpener, FrameSealer
from tests.fuzz.mutations import any_value, changed_content
from tests.fuzz.samples import sample
from tests.unit.monitor.telemetry.ring.rings import IDENTITY, SMALL, operate
from tests.unit.monitor.tree.test_summary import summary
from tests.unit.transport.test_frames import opened, sealed


@dataclass(frozen=True, slots=True)
class Decoder:
    """One decoder.

    Attributes:
        samples: bytes that it decodes, or nearly.
        decode: decodes bytes, or raises.
        errors: what it may raise.
    """

    samples: Callable[[Random], bytes]
    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]

    def enter(self, seed: str) -> str:
        """Decode changed bytes; return `read` or `refused`."""
        random = Random(seed)
        data = self.samples(random)
        for _ in range(random.choice((0, 1, 1, 2))):
            data = changed_content(data, random) if data else data
        try:
            self.decode(data)
        except self.errors:
            return "refused"
        return "read"


_RECORDS: Sequence[type[Record]] = [
    kind
    for kind in vars(records).values()
    if isinstance(kind, type) and issubclass(kind, Record) and kind is not Record
]
_KEYS = Keys("run7")
_KEY_NAMES = (
    "generation", "closing", "snapshot", "persist", "checkpoint", "store_failure", "history",
    "result", "verdicts", "secret", "last_join", "nodes/a", "evictions/a", "restarts/3",
    "members/a", "placements/3", "restarts/x", "nodes", "", "unknown/x",
)  # fmt: skip
_LIMIT_NBYTES = 2**20


_RULES = b"""
[config]
heads = "num_attention_heads"
head_dim = ["head_dim", "hidden_size / num_attention_heads"]

[[rule]]
match = "layers.{layer:int}.qkv.{leaf:weight|bias}"
rename = ["h.{layer}.q.{leaf}", "h.{layer}.k.{leaf}", "h.{layer}.v.{leaf}"]
parts = { q = "heads * head_dim", k = "heads * head_dim", v = "heads * head_dim" }
interleave = "heads"

[[rule]]
match = "mask"
drop = "made from the configuration"
"""


def _object(names: Sequence[str]) -> Callable[[Random], bytes]:
    """Return what makes JSON objects with some of these fields."""

    def make(random: Random) -> bytes:
        chosen = random.sample(names, random.randrange(len(names) + 1))
        content = {name: any_value(random, random.choice((1, "a", None))) for name in chosen}
        return json.dumps(content).encode()

    return make


def _view(data: bytes) -> None:
    items = []
    for number, value in enumerate(data.split(b"\n")):
        name = _KEY_NAMES[(len(value) + number) % len(_KEY_NAMES)]
        items.append(KeyValue(f"{_KEYS.prefix}{name}", value, 1, 1))
    from_listing(_KEYS, Listing(1, tuple(items)))


def _view_sample(random: Random) -> bytes:
    return b"\n".join(_record(random.choice(_RECORDS))(random) for _ in range(3))


def _record(kind: type[Record]) -> Callable[[Random], bytes]:
    return lambda random: json.dumps(sample(kind, random)).encode()


def _message(codec: Codec[Any]) -> Callable[[Random], bytes]:
    kinds = sorted(codec.types, key=lambda kind: kind.__name__)

    def message(random: Random) -> bytes:
        kind = random.choice(kinds)
        return json.dumps({**(sample(kind, random) or {}), "type": kind.__name__}).encode()

    return message


def _frames(random: Random) -> bytes:
    sealer = FrameSealer(None, _LIMIT_NBYTES)
    return b"".join(
        sealed(
            sealer, random.randbytes(random.randrange(40)), random.randbytes(random.randrange(40))
        )
        for _ in range(3)
    )


def _open_frames(data: bytes) -> None:
    opened(FrameOpener(None, _LIMIT_NBYTES, "peer"), data, 9)


def _ring_sample() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rank-00003.ring"
        ring = Ring.create(path, IDENTITY, SMALL)
        ring.add_communicator(Communicator.of("world", range(8)))
        for number in range(1, 5):
            operate(ring, number)
        ring.close()
        return path.read_bytes()


def _read_ring(data: bytes) -> None:
    path = Path(f"{os.environ['KEEPSTEP_FUZZ_PLACE']}/rank-00003.ring")
    path.write_bytes(data)
    path.chmod(0o600)
    reader = RingReader(path)
    try:
        reader.is_alive()
        reader.last(10_000)
        reader.communicators()
        assert reader.ending is not None
    finally:
        reader.close()


def decoders() -> dict[str, Decoder]:
    """Return every decoder by its name."""
    entries: dict[str, Decoder] = {}
    for kind in _RECORDS:
        entries[f"record {kind.__name__}"] = Decoder(_record(kind), kind.decode, (UsageError,))
    entries["record secret"] = Decoder(_object(["secret"]), decode_secret, (UsageError,))
    entries["view"] = Decoder(_view_sample, _view, (UsageError,))
    for module in (memory_messages, saving_messages, worker_messages, preflight_messages):
        for protocol in vars(module).values():
            for direction in ("requests", "replies"):
                codec = getattr(protocol, direction, None)
                if isinstance(codec, Codec):
                    name = f"message {module.__name__.rpartition('.')[0]} {direction}"
                    entries[name] = _codec_decoder(codec)
    entries["frames"] = Decoder(_frames, _open_frames, (TransportError,))
    whole_summary = encode_summary(summary())
    entries["summary"] = Decoder(lambda _: whole_summary, decode_summary, (ProtocolViolation,))
    entries["clocks"] = Decoder(
        lambda _: b'{"a": [0.5, null], "b": [1, 2]}', decode_clocks, (ProtocolViolation,)
    )
    entries["answer"] = Decoder(_object(["a", "b"]), parse_object, (ProtocolViolation,))
    ring = _ring_sample()
    entries["ring"] = Decoder(lambda _: ring, _read_ring, (RingUnreadable,))
    entries["index of a shard"] = Decoder(
        lambda _: (
            b'{"nbytes": 8, "entries": [["w", "float32", [2], [0], [2], 0, 8]]}\n{"data": [1]}'
        ),
        lambda data: read_index(data, 0),
        (SnapshotUnavailable,),
    )
    entries["rules"] = Decoder(lambda _: _RULES, _parse_rules, (RulesInvalid,))
    return entries


def _codec_decoder(codec: Codec[Any]) -> Decoder:
    return Decoder(_message(codec), lambda data: codec.decode(data, "peer"), (TransportError,))


def _parse_rules(data: bytes) -> None:
    parse_rules(data.decode(errors="replace"), "rules.toml")
