"""Changes of a checkpoint's files: by bytes, by fields of their formats, and among files.

Whoever changes a file to do harm also adapts its checksums, so half of the changes do.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import zipfile
import zlib
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import crc32c

from keepstep.checkpoint.format.stored.stored_json import encode

Files = Mapping[str, bytes]

NUMBERS = (
    0, 1, -1, 2, 7, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
    2**40, 2**53, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63), 10**30,
)  # fmt: skip
TEXTS = (
    "", "a", "..", "../../etc/passwd", "/etc/passwd", "a/../../b", "a\0b", "\ud800", "é" * 300,
    "file:///etc/passwd", "gs://bucket/x", "float32", "float64", "F32", "int4", "<f4", "zstd",
    "NaN", "model", "optim/x/step", "zarr.json", "__x", ".", "posix.system",
)  # fmt: skip
# Pieces of pickles: names of harm, calls, marks, numbers without bounds, what doubles itself.
PICKLED = (
    b"cposix\nsystem\n", b"(S'touch pwned'\ntR", b"cbuiltins\neval\n", b"cbuiltins\ngetattr\n",
    b"c__builtin__\nset\n", b"cbuiltins\nbytearray\n", b"ctorch\nFloatStorage\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n", b"cnumpy.core.multiarray\n_reconstruct\n",
    b"(", b"0", b"1", b"2", b"N", b")", b"]", b"}", b"t", b"R", b"b", b"a", b"e", b"u", b"s", b"Q",
    b"\x85", b"\x86", b"\x87", b"\x81", b"\x92", b"\x93", b"\x94", b"\x90", b"\x91", b"\x8f",
    b"h\x00", b"h\x01", b"q\x00", b"q\x01", b"j\xff\xff\xff\x7f", b"r\xff\xff\xff\x7f",
    b"J\xff\xff\xff\x7f", b"J\xff\xff\xff\xff", b"M\xff\xff", b"L" + b"9" * 900 + b"L\n",
    b"I" + b"9" * 5000 + b"\n", b"F1e999\n", b"Fnan\n", b"G\x7f\xf8" + bytes(6),
    b"\x8b\xff\xff\xff\x7f", b"\x8e" + b"\xff" * 8, b"\x96" + b"\xff" * 8, b"T\xff\xff\xff\xff",
    b"]" + b"2\x85" * 70, b"]q\x00h\x00a", b"}q\x00(K\x01h\x00u",
    b"]" * 300, b"(" * 300, b"\x80\xff", b"\x95" + b"\xff" * 8, b".",
)  # fmt: skip


def mutated(files: Files, random: Random) -> dict[str, bytes | None]:
    """Return what files become: their new content by name, None for a file that is deleted."""
    changed: dict[str, bytes | None] = {}
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        current = {**files, **changed}
        present = {name: data for name, data in current.items() if data is not None}
        if not present:
            break
        if len(present) > 1 and random.random() < 0.12:
            changed |= _among_files(present, random)
            continue
        # Small files mostly tell how the large ones are read.
        names = random.sample(sorted(present), min(random.choice((1, 2)), len(present)))
        name = min(names, key=lambda n: len(present[n]))
        changed[name] = changed_content(present[name], random)
    if random.random() < 0.5:
        changed |= _sealed_manifests({**files, **changed})
    return {name: data for name, data in changed.items() if data != files.get(name)}


def changed_content(data: bytes, random: Random) -> bytes:
    """Return a file's content with one or a few changes."""
    kinds: list[Callable[[bytes, Random], bytes]] = [_bytes_changed, _bytes_changed]
    if data[:1] in (b"{", b"["):
        kinds += [json_changed] * 6
    if data[8:9] == b"{":
        kinds += [_safetensors_changed] * 6
    if data[:4] == b"PK\x03\x04":
        kinds += [_zip_fields_changed, _pickle_in_zip_changed, _pickle_in_zip_changed]
    if data[:1] == b"\x80":
        kinds += [pickle_changed] * 4
    if b"\x0c\xdb" in data:
        kinds += [_ocdbt_changed] * 4
    return random.choice(kinds)(data, random)


def _bytes_changed(data: bytes, random: Random) -> bytes:
    content = bytearray(data)
    at = random.randrange(len(content) + 1)
    match random.randrange(7):
        case 0:
            for _ in range(random.choice((1, 1, 2, 8))):
                if content:
                    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        case 1:
            del content[at:]
        case 2:
            del content[at : at + random.choice((1, 2, 4, 8, 64))]
        case 3:
            content[at:at] = random.randbytes(random.choice((1, 2, 4, 8, 64)))
        case 4:
            width = random.choice((1, 2, 4, 8))
            number = random.choice(NUMBERS) % 256**width
            content[at : at + width] = number.to_bytes(width, random.choice(("little", "big")))
        case 5:
            start = random.randrange(len(content) + 1)
            content[at:at] = content[start : start + random.choice((1, 4, 16, 256))]
        case _:
            content[at : at + 16] = bytes(random.choice((1, 8, 16)))
    return bytes(content)


def _among_files(files: Mapping[str, bytes], random: Random) -> dict[str, bytes | None]:
    one, other = random.sample(sorted(files), 2)
    match random.randrange(6):
        case 0:
            return {one: files[other], other: files[one]}
        case 1:
            return {one: None}
        case 2:
            return {one: b""}
        case 3:
            return {one: files[other]}
        case 4:
            return {one: None, f"{one}.{random.choice(('bak', '1', 'json'))}": files[one]}
        case _:
            at = random.randrange(len(files[one]) + 1)
            start = random.randrange(len(files[other]) + 1)
            return {one: files[one][:at] + files[other][start:]}


def json_changed(data: bytes, random: Random) -> bytes:
    """Return JSON in which values are others; what is no JSON by bytes."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return _bytes_changed(data, random)
    if random.random() < 0.03:
        depth = random.choice((100, 900, 10**5))
        return b'{"a":' * depth + b"1" + b"}" * depth
    for _ in range(random.choice((1, 1, 2))):
        content = _value_changed(content, random)
    try:
        return json.dumps(content).encode()
    except (ValueError, RecursionError):
        return data


def _value_changed(value: Any, random: Random) -> Any:
    if not isinstance(value, dict | list) or not value or random.random() < 0.1:
        return any_value(random, value)
    if isinstance(value, list):
        at = random.randrange(len(value))
        match random.randrange(8):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return [*value, value[at]]
        return [*value[:at], _value_changed(value[at], random), *value[at + 1 :]]
    key = random.choice(sorted(value))
    match random.randrange(10):
        case 0:
            return {name: item for name, item in value.items() if name != key}
        case 1:
            return {**value, random.choice(TEXTS): value[key]}
        case 2:
            return {**value, key: value[random.choice(sorted(value))]}
    return {**value, key: _value_changed(value[key], random)}


def any_value(random: Random, like: Any = None) -> Any:
    """Return some JSON, mostly of the kind of a value."""
    if isinstance(like, int) and not isinstance(like, bool) and random.random() < 0.7:
        return random.choice((*NUMBERS, like + 1, like - 1, like * 2))
    if isinstance(like, str) and random.random() < 0.7:
        return random.choice((*TEXTS, like + "x", like[:-1], like.replace("/", "/../")))
    options: tuple[Any, ...] = (
        None, True, 1.5, float("nan"), float("inf"), [], {}, [[]], {"a": 1}, [0] * 40,
        random.choice(NUMBERS), random.choice(TEXTS),
    )  # fmt: skip
    return random.choice(options)


def _safetensors_changed(data: bytes, random: Random) -> bytes:
    nbytes = int.from_bytes(data[:8], "little")
    header = json_changed(data[8 : 8 + nbytes], random)
    return len(header).to_bytes(8, "little") + header + data[8 + nbytes :]


def _zip_fields_changed(data: bytes, random: Random) -> bytes:
    content = bytearray(data)
    signatures = (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07")
    places = [
        at for signature in signatures if (at := _any_place(data, signature, random)) is not None
    ]
    at = random.choice(places) + random.randrange(4, 46)
    width = random.choice((1, 2, 4, 8))
    old = int.from_bytes(content[at : at + width], "little")
    number = random.choice((*NUMBERS, old + 1, old - 1, old + 64)) % 256**width
    content[at : at + width] = number.to_bytes(width, "little")
    return bytes(content)


def _any_place(data: bytes, needle: bytes, random: Random) -> int | None:
    places = []
    at = data.find(needle)
    while at >= 0:
        places.append(at)
        at = data.find(needle, at + 1)
    return random.choice(places) if places else None


def _pickle_in_zip_changed(data: bytes, random: Random) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
    # What was changed before may be encrypted, compressed, or cut off.
    except (zipfile.BadZipFile, zlib.error, ValueError, RuntimeError, OSError, EOFError):
        return _bytes_changed(data, random)
    for name in entries:
        if name.endswith("data.pkl"):
            entries[name] = pickle_changed(entries[name], random)
    # What was changed before may have no entry left.
    if entries and random.random() < 0.1:
        name = random.choice(sorted(entries))
        entries[random.choice(("../x", "/x", "a/data.pkl", name))] = entries.pop(name)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def pickle_changed(data: bytes, random: Random) -> bytes:
    """Return a pickle in which operations are missing, doubled, swapped, or others."""
    try:
        starts = [place for _, _, place in pickletools.genops(data) if place is not None]
    except (ValueError, IndexError, pickle.UnpicklingError, UnicodeDecodeError):
        return _bytes_changed(data, random)
    end = starts[-1] + 1
    parts = [data[a:b] for a, b in zip(starts, [*starts[1:], end], strict=True)]
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(len(parts))
        match random.randrange(6):
            case 0:
                parts.pop(at)
            case 1:
                parts.insert(at, parts[at])
            case 2:
                other = random.randrange(len(parts))
                parts[at], parts[other] = parts[other], parts[at]
            case 3:
                parts[at] = _bytes_changed(parts[at], random)
            case 4:
                parts[at] = random.choice(PICKLED)
            case _:
                parts.insert(at, random.choice(PICKLED))
        parts = parts or [b"."]
    return b"".join(parts) + data[end:]


def _ocdbt_changed(data: bytes, random: Random) -> bytes:
    """Return a manifest or a data file of which one node is changed, with the checksum it needs."""
    content = bytearray(data)
    magic = b"\x0c\xdb\x3a\x2a" if data.startswith(b"\x0c\xdb\x3a\x2a") else b"\x0c\xdb\x20\xde"
    at = _any_place(data, magic, random)
    nbytes = 0 if at is None else int.from_bytes(data[at + 4 : at + 12], "little")
    if at is None or not 20 < nbytes <= len(data) - at:
        return _bytes_changed(data, random)
    body = _bytes_changed(bytes(content[at + 12 : at + nbytes - 4]), random)
    # Other nodes are where they were, so the size stays: but for a manifest, which is alone.
    if at or nbytes != len(data):
        body = body[: nbytes - 16].ljust(nbytes - 16, b"\0")
    node = magic + (len(body) + 16).to_bytes(8, "little") + body
    content[at : at + nbytes] = node + crc32c.crc32c(node).to_bytes(4, "little")
    return bytes(content)


def _sealed_manifests(files: Mapping[str, bytes | None]) -> dict[str, bytes | None]:
    """Return keepstep's manifests that list sizes and checksums of the objects as they are."""
    sealed: dict[str, bytes | None] = {}
    for name, data in files.items():
        if not name.endswith("manifest.json") or data is None:
            continue
        try:
            content = json.loads(data)
            for entry in content["objects"]:
                for other, bytes_now in files.items():
                    if other.endswith(f"/{entry[0]}") and bytes_now is not None:
                        entry[1:] = [len(bytes_now), crc32c.crc32c(bytes_now)]
            if content.pop("crc32c", None) is not None:
                content["crc32c"] = crc32c.crc32c(encode(content))
            sealed[name] = json.dumps(content).encode()
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            continue
    return sealed
