"""Pickles become what they stand for where that is plain data, and inert records elsewhere."""

from __future__ import annotations

import argparse
import collections
import pickle
import pickletools
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.convert.read.arrays import FileArray
from keepstep.checkpoint.convert.read.files import open_files
from keepstep.checkpoint.convert.read.pickled_tensors import (
    PickledStorage,
    StorageKind,
    torch_constructors,
)
from keepstep.checkpoint.convert.read.pickled_values import (
    Global,
    NumpyArray,
    Record,
    plain_constructors,
)
from keepstep.checkpoint.convert.read.pickles import unpickle
from keepstep.checkpoint.errors import CheckpointDamaged
from tests.adaptive_timeouts import patient
from tests.examples import examples

KEYS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text(max_size=9)
    | st.binary(max_size=9)
    | st.tuples(st.integers(0, 9), st.text(max_size=3))
)
VALUES = st.recursive(
    KEYS | st.integers() | st.sets(KEYS, max_size=4) | st.frozensets(KEYS, max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


def read(data: bytes) -> Any:
    value, end = unpickle(data, "file", plain_constructors())
    assert end == len(data)
    return value


@given(VALUES, st.integers(0, 5))
def test_plain_values_are_what_python_reads(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    expected = pickle.loads(data)
    assert read(data) == expected
    assert repr(read(pickletools.optimize(data))) == repr(expected)


def test_references_are_kept() -> None:
    shared = [1]
    first, second = read(pickle.dumps([shared, shared]))
    assert first is second


def test_containers_of_the_standard_library_are_plain() -> None:
    value = [
        collections.OrderedDict(a=1),
        collections.defaultdict(list, {"b": [2]}),
        collections.Counter("aab"),
        collections.deque([3], maxlen=5),
        bytearray(b"four"),
        complex(1, -2),
    ]
    for protocol in range(6):
        assert read(pickle.dumps(value, protocol)) == [
            {"a": 1}, {"b": [2]}, {"a": 2, "b": 1}, [3], b"four", 1 - 2j,
        ]  # fmt: skip


@pytest.mark.parametrize("protocol", range(6))
def test_numpys_values_are_arrays_and_numbers(protocol: int) -> None:
    values = [
        np.arange(6, dtype="<i2").reshape(2, 3),
        np.arange(6, dtype=">f8").reshape(2, 3).T,
        np.array([], np.float32),
        np.array(True),
        np.array(["ab", "c"]),
    ]
    state = np.random.default_rng(1).bit_generator.state
    arrays = read(pickle.dumps([*values, np.float32(1.5), np.int64(-3), state], protocol))
    for expected, array in zip(values, arrays[:5], strict=True):
        assert isinstance(array, NumpyArray)
        assert array.values is not None
        np.testing.assert_array_equal(array.values, expected, strict=expected.dtype.isnative)
    assert arrays[5:] == [1.5, -3, state]
    objects = read(pickle.dumps(np.array([1, "a"], object), protocol))
    assert objects.values is None


@dataclass(frozen=True)
class Place:
    name: str
    offset: tuple[int, ...]


class Odd:
    """An object that Python reads only by a call that the pickle names."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (eval, ("1/0",), {"a": 1}, iter([2]), iter([("k", 3)]))


def test_objects_are_records_also_as_keys() -> None:
    namespace = argparse.Namespace(lr=0.1, sizes=[1, 2])
    value = read(pickle.dumps({"args": namespace, "of": {Place("w", (0, 4)): 5}, "odd": Odd()}))
    assert value["args"].name == "argparse.Namespace"
    assert value["args"].attributes == {"lr": 0.1, "sizes": [1, 2]}
    (place,) = value["of"]
    assert place.name.endswith(".Place")
    assert place.attributes == {"name": "w", "offset": (0, 4)}
    odd = value["odd"]
    assert (odd.name, odd.args, odd.state) == ("builtins.eval", ("1/0",), {"a": 1})
    assert (odd.items, odd.entries) == ([2], {"k": 3})


def test_names_and_calls_of_attributes_are_inert() -> None:
    data = b"c__builtin__\ngetattr\n(cos\nsystem\nS'x'\ntR(S'true'\ntR."
    record = read(data)
    assert isinstance(record, Record)
    assert (record.name, record.args) == ("os.system.x", ("true",))
    assert read(b"cos\nsystem\n.") == Global("os.system")


CALLED = """
import sys
events = []
sys.path.insert(0, sys.argv[2])
from keepstep.checkpoint.convert.read.files import open_files
from keepstep.checkpoint.convert.read.torch_file import read_torch_file
from keepstep.checkpoint.convert.read.pickled_values import plain_constructors
from keepstep.checkpoint.convert.read.pickles import unpickle
data = open(sys.argv[1], "rb").read()
sys.addaudithook(lambda event, args: events.append((event, args)))
value, _ = unpickle(data, "file", plain_constructors())
# Whether values are the same is asked of Python too.
found = [event for event in events if event[0] != "builtins.id"]
print(found, value)
sys.exit(bool(found))
"""


HOSTILE = (
    b"cposix\nsystem\n(S'touch pwned'\ntR.",
    b"c__builtin__\nexec\n(S'import os'\ntR.",
    b"(S'touch pwned'\nios\nsystem\n.",
    b"(cos\nsystem\nS'touch pwned'\no.",
    b"\x80\x02cmodule_that_is_there\nThing\n)\x81}b.",
    b"\x80\x04\x8c\x15module_that_is_there.\x8c\x05Thing\x93)R.",
    b"c__builtin__\n__import__\n(S'module_that_is_there'\ntR.",
    b"c__builtin__\ngetattr\n(c__builtin__\n__import__\nS'x'\ntR(S'y'\ntR.",
    pickle.dumps([np.arange(3), np.float32(1), {"a": collections.OrderedDict(b=1)}], 2),
)


@pytest.mark.parametrize("data", HOSTILE)
def test_nothing_is_imported_executed_or_opened(tmp_path: Path, data: bytes) -> None:
    """Python's audit events tell of every import, call of the system, and file."""
    (tmp_path / "module_that_is_there.py").write_text("raise SystemExit(9)")
    (tmp_path / "pickle").write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", CALLED, str(tmp_path / "pickle"), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        env={"PYTHONPATH": str(Path(__file__).parents[5])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "pwned").exists()


def _nested(count: int) -> bytes:
    return b"]" * count + b"a" * (count - 1) + b"."


REFUSED = {
    "empty": (b"", "exhausted before"),
    "truncated": (pickle.dumps(["text" * 9])[:-9], "cannot be read"),
    "no opcode": (b"\xff.", "opcode .* unknown"),
    "protocol": (b"\x80\x06N.", "protocol: 6"),
    "memo bomb": (b"Nr\xff\xff\xff\x7f0j\xfe\xff\xff\x7f.", "value 2147483647 is remembered"),
    "bytes bomb": (b"\x8e" + struct.pack("<Q", 2**62) + b".", "but only 1 remain"),
    "negative length": (b"T\xff\xff\xff\xff.", "byte count < 0"),
    "integer bomb": (b"\x8b\xff\xff\xff\x7f.", "not enough data"),
    "text integer": (b"L" + b"9" * 5000 + b"\n.", "limit"),
    "no end of line": (b"c" + b"a" * 10**5, "no newline"),
    "deep": (_nested(10**5), "nested more than 200 deep"),
    "itself": (b"]\x94h\x00a.", "contains itself"),
    "itself deeper": (b"]\x94}K\x01h\x00sa.", "contains itself"),
    "list as a key": (b"}]Ns.", "unhashable type"),
    "odd items": (b"}(NNNu.", "odd number of items"),
    "appending to text": (b"VK\nNa.", "has no attribute"),
    "calling text": (b"VK\n)R.", "not callable"),
    "arguments": (b"cos\nsystem\nNR.", "must be a tuple"),
    "persistent": (b"K\x01Q.", "outside of the pickle"),
    "out of band": (b"\x97.", "out-of-band data"),
    "extension": (b"\x82\x01.", "code by a number"),
    "zeros": (b"c__builtin__\nbytearray\n(J\xff\xff\xff\x7ftR.", "made of a int"),
    "wrong arguments": (b"ctorch\nSize\n(NNtR.", "positional argument"),
    "codec": (b"c_codecs\nencode\n(VK\nVrot13\ntR.", "another codec"),
    "stack": (b"0.", "stack underflow"),
    "marks": (b"t.", "MARK"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.timeout(patient(20))
def test_absurd_pickle_is_refused_by_file_and_place(name: str) -> None:
    data, reason = REFUSED[name]
    with pytest.raises(CheckpointDamaged, match=f"^file: .*{reason}"):
        unpickle(data, "file", plain_constructors())


@pytest.mark.parametrize("state", [b"}Vextent\nNs", b"]", b"N}Vextent\nNs\x86", b"\x8c\x01x\x85"])
def test_no_state_changes_a_tensor_a_storage_or_a_name(tmp_path: Path, state: bytes) -> None:
    """Python's unpickler gives states to whatever takes them."""
    (tmp_path / "f").write_bytes(bytes(8))
    extent = open_files(str(tmp_path / "f")).file("f").whole

    def storage() -> PickledStorage:
        return PickledStorage(extent, StorageKind(4, "float32"))

    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(NQK\x00K\x02\x85K\x01\x85tR"
    for made in (b"NQ", tensor, b"ctorch\nfloat32\n"):
        try:
            value, _ = unpickle(
                made + state + b"b.", "file", torch_constructors(), lambda _: storage()
            )
        except CheckpointDamaged:
            continue
        expected = {b"NQ": storage(), tensor: FileArray(extent, "float32", (2,), (1,))}
        assert value == expected.get(made, Global("torch.float32"))


def test_records_may_contain_each_other() -> None:
    record = read(b"cm\nNode\n)\x81\x94}Vparent\nh\x00sb.")
    assert record.attributes["parent"] is record


@pytest.mark.parametrize("bad", ["shape", "size", "type"])
def test_numpy_array_that_contradicts_itself_is_refused(bad: str) -> None:
    state: list[Any] = [1, (3,), None, False, bytes(12)]
    if bad == "shape":
        state[1] = (-3,)
    if bad == "size":
        state[4] = bytes(11)
    head = b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85C\x01btR"
    dtype = b"cnumpy\ndtype\n(V<i4\ntR" if bad == "type" else b"cnumpy\ndtype\n(Vi4\ntR"
    data = head + b"(K\x01" + pickle.dumps(state[1], 0)[:-1] + dtype + b"\x89"
    data += pickle.dumps(state[4], 3)[2:-1] + b"tb."
    if bad == "type":
        assert read(data).values is None
        return
    with pytest.raises(CheckpointDamaged, match="cannot be read"):
        read(data)


@given(VALUES, st.integers(0, 5), st.integers(0, 10**6), st.binary(min_size=1, max_size=3))
@settings(max_examples=examples(300))
def test_changed_bytes_are_read_or_refused(
    value: object, protocol: int, at: int, changed: bytes
) -> None:
    data = pickle.dumps([value, collections.OrderedDict(a=np.arange(3)), Odd()], protocol)
    at %= len(data)
    try:
        unpickle(data[:at] + changed + data[at + len(changed) :], "file", plain_constructors())
    except CheckpointDamaged:
        pass


@given(st.binary(max_size=200))
@settings(max_examples=examples(300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        unpickle(data, "file", plain_constructors())
    except CheckpointDamaged:
        pass
