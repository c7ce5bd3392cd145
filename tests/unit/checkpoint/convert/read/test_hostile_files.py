"""Files made to do harm: each is refused by its name, and Python's audit events show nothing done.

All are read by one process, in which nothing is imported any more, no command is run, no file is
opened but those of the checkpoint, and memory is limited.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.adaptive_timeouts import patient
from tests.opened_checkpoints import open_foreign
from tests.unit.checkpoint.convert.read.test_dcp_folders import changed, set_chunks, set_place
from tests.unit.checkpoint.convert.read.test_hugging_face import index_of, weights
from tests.unit.checkpoint.convert.read.test_orbax import array, tree_of
from tests.unit.checkpoint.convert.read.test_safetensors_file import content_of

ROOT = Path(__file__).parents[5]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def pickled(data: bytes) -> Callable[[Path], None]:
    """Return what writes a file of torch.save with this pickle."""

    def write(path: Path) -> None:
        torch.save({"w": torch.ones(2)}, path / "first.pt")
        with (
            zipfile.ZipFile(path / "first.pt") as first,
            zipfile.ZipFile(path / "state.pt", "w") as second,
        ):
            for name in first.namelist():
                second.writestr(name, data if name.endswith("data.pkl") else first.read(name))
        (path / "first.pt").unlink()

    return write


class Loop(nn.Module):
    """A module that has itself as a part."""

    def __init__(self) -> None:
        super().__init__()
        self._modules["again"] = self


def zip_bomb(path: Path) -> None:
    torch.save({"w": torch.zeros(2**20)}, path / "first.pt")
    with (
        zipfile.ZipFile(path / "first.pt") as first,
        zipfile.ZipFile(path / "state.pt", "w", zipfile.ZIP_DEFLATED) as second,
    ):
        for name in first.namelist():
            second.writestr(name, first.read(name))
    (path / "first.pt").unlink()


def folder_with(files: dict[str, Any]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        for name, content in files.items():
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            (path / name).write_bytes(data)

    return write


def truncated(path: Path) -> None:
    torch.save({"w": torch.ones(100)}, path / "state.pt")
    content = (path / "state.pt").read_bytes()
    (path / "state.pt").write_bytes(content[: len(content) // 2])


def linked(path: Path) -> None:
    outside = path.parent / "secret.safetensors"
    outside.write_bytes(weights("w"))
    (path / "model.safetensors").symlink_to(outside)
    (path / "config.json").write_text("{}")


def orbax(**changes: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        tree_of(path, {"shape": [7, 10], "chunks": [4, 4], "compressor": {"id": "zstd"}})
        array(**changes)(path)

    return write


SYSTEM = b"cposix\nsystem\n(Vtouch pwned\ntR"
GETATTR = b"c__builtin__\ngetattr\n(cposix\nerror\nVsystem\ntR(Vtouch pwned\ntR"
ABSURD = {"w": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}}

HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    # What writes it to a folder; the class of the error, the file's name, and what is said of it.
    "a command": (pickled(SYSTEM + b"."), "FormatUnsupported .*state.pt.*posix.system"),
    "a command by getattr": (pickled(GETATTR + b"."), "FormatUnsupported .*state.pt"),
    "a command instead of a tensor": (
        pickled(b"}(Va\n" + SYSTEM + b"u."), "FormatUnsupported .*state.pt",
    ),
    "a whole module": (lambda path: torch.save(Loop(), path / "state.pt"),
                       "CheckpointDamaged .*state.pt.*contains itself"),
    "a pickle that is in itself": (
        pickled(b"}q\x00(Va\nh\x00u."), "CheckpointDamaged .*state.pt.*contains itself",
    ),
    "a pickle that doubles": (
        pickled(b"}(Va\nN" + b"2\x86" * 100 + b"u."), "FormatUnsupported .*state.pt",
    ),
    "a zip bomb": (zip_bomb, "CheckpointDamaged .*state.pt.*compressed"),
    "truncated": (truncated, "CheckpointDamaged .*state.pt"),
    "an absurd shape": (
        folder_with({"model.safetensors": content_of(ABSURD, bytes(8)), "config.json": {}}),
        "CheckpointDamaged .*model.safetensors",
    ),
    "deep JSON": (
        folder_with({"model.safetensors": weights("w"), "config.json": b'{"a":' * 10**6}),
        "CheckpointDamaged .*config.json",
    ),
    "an index that leads elsewhere": (
        folder_with({"model.safetensors.index.json": index_of({"w": "../outside"})}),
        r"CheckpointMissing .*'\.\./outside'",
    ),
    "DCP that leads elsewhere": (
        lambda path: changed(path, set_place("model.w", relative_path="../outside")),
        r"CheckpointMissing .*'\.\./outside'",
    ),
    "shards that overlap": (
        lambda path: changed(path, set_chunks(((0, 0), (3, 3)), ((2, 0), (2, 3)))),
        "CheckpointDamaged .*__0_0.distcp.*overlaps",
    ),
    "a link that leads elsewhere": (linked, "CheckpointDamaged .*model.safetensors.*is a link to"),
    "an absurd grid of chunks": (
        orbax(shape=[2**30, 2**30], chunks=[1, 1]), "CheckpointMissing .*a/.zarray",
    ),
    "an absurd chunk": (
        orbax(shape=[2**50, 1], chunks=[2**50, 1]), "CheckpointDamaged .*a/.zarray.*cannot be in",
    ),
}  # fmt: skip

READ = """
import sys
from pathlib import Path
from tests.fuzz.cases import Seed
from tests.fuzz.guard import Guard, limit_addresses

place = Path(sys.argv[1])
from tests.opened_checkpoints import open_foreign
from tests.fuzz.cases import read_all
import tensorstore
import encodings.cp437
from keepstep.checkpoint.errors import CheckpointError

guard = Guard(place)
limit_addresses()
for folder in sorted(path for path in place.iterdir() if path.is_dir()):
    file = folder / "state.pt"
    error = None
    guard.watch(True)
    try:
        read_all(open_foreign(str(file if file.exists() else folder)))
    except CheckpointError as caught:
        error = caught
    guard.watch(False)
    print(folder.name, "|", type(error).__name__, error, "|", guard.events)
    guard.events.clear()
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """The outcome of reading each: the error, and the audit events."""
    place = tmp_path_factory.mktemp("hostile")
    (place / "outside").write_bytes(b"secret")
    for name, (write, _) in HOSTILE.items():
        (place / name).mkdir()
        write(place / name)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(place)],
        capture_output=True, text=True, cwd=place, check=True, timeout=patient(120),
        env={"PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1"},
    )  # fmt: skip
    assert not list(place.rglob("pwned"))
    lines = (line.split(" | ") for line in done.stdout.splitlines())
    return {name: (error, events) for name, error, events in lines}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_refused_by_its_name_and_nothing_is_done(
    outcomes: dict[str, tuple[str, str]], name: str
) -> None:
    error, events = outcomes[name]
    assert re.match(HOSTILE[name][1], error), error
    assert events == "[]"


def test_links_within_a_folder_and_to_the_cache_of_hugging_face_are_followed(
    tmp_path: Path,
) -> None:
    blob = tmp_path / "blobs" / "0123"
    folder = tmp_path / "snapshots" / "main"
    for path in (blob.parent, folder):
        path.mkdir(parents=True)
    blob.write_bytes(weights("w"))
    (folder / "model.safetensors").symlink_to("../../blobs/0123")
    (folder / "config.json").write_text("{}")
    assert set(open_foreign(str(folder)).tensors) == {"model/w"}
    # A link that the user names is the user's own.
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "named").symlink_to(blob)
    assert set(open_foreign(str(other / "named")).tensors) == {"model/w"}
    (folder / "model.safetensors").unlink()
    (folder / "real").write_bytes(weights("v"))
    os.symlink("real", folder / "model.safetensors")
    assert set(open_foreign(str(folder)).tensors) == {"model/v"}


@pytest.mark.parametrize(
    ("act", "event"),
    [
        ("import pickle; pickle.loads(b'cos\\nsystem\\n(Vtrue\\ntR.')", "os.system"),
        ("open('/etc/passwd')", "open"),
        ("open(place / 'new', 'w')", "open"),
        ("import tabnanny", "import"),
        ("exec('1')", "exec"),
        ("__import__('socket').socket()", "socket.__new__"),
    ],
)
def test_the_guard_notes_what_no_reader_does(tmp_path: Path, act: str, event: str) -> None:
    code = (
        "import pickle, socket, sys; from pathlib import Path\n"
        "from tests.fuzz.guard import Guard\n"
        "place = Path(sys.argv[1]); guard = Guard(place)\n"
        f"guard.watch(True)\n{act}\nguard.watch(False)\n"
        "print(guard.events)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert f"'{event} " in done.stdout or f'"{event} ' in done.stdout, done.stdout
