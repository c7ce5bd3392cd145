"""Files that only the code that they name can load: not run unasked, and named before it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from keepstep.checkpoint.cli.ckpt import ckpt

MODULE = """
import pathlib
import torch

MARK = pathlib.Path(__file__).with_name("was-run")

class Holder:
    def __init__(self):
        self.weights = torch.arange(6.0)

    def state_dict(self):
        return {"weights": self.weights}

    def __setstate__(self, state):
        MARK.touch()
        print("loading")
        self.__dict__ = state

class Opaque:
    pass
"""
SAVE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import training_code
content = {"net": training_code.Holder(), "opaque": training_code.Opaque(), "step": 4}
torch.save(content, sys.argv[1] + "/a.pt")
torch.save({"w": torch.ones(2), "net": training_code.Holder()}, sys.argv[1] + "/b.pt")
"""
AUDITED = """
import json, sys
told = []
def hook(event, args):
    if event in ("subprocess.Popen", "os.system", "exec") or event == "import":
        told.append(f"{event} {args[0]}")
from click.testing import CliRunner
from keepstep.checkpoint.cli.ckpt import ckpt
import keepstep.checkpoint.convert.write.torch_target
sys.addaudithook(hook)
for source in sys.argv[2:]:
    CliRunner().invoke(ckpt, ["convert", source, sys.argv[1] + "/made.pt"])
bad = [line for line in told if "training_code" in line or line.startswith("subprocess")]
print(json.dumps(bad))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trusted")
    (root / "training_code.py").write_text(MODULE)
    subprocess.run([sys.executable, "-c", SAVE, str(root)], check=True)
    return root


def test_nothing_runs_unless_the_file_is_trusted_and_then_it_is_named(
    files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    audited = subprocess.run(
        [sys.executable, "-c", AUDITED, tmp_path, files / "a.pt", files / "b.pt"],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    assert json.loads(audited.stdout) == []
    assert not (files / "was-run").exists()
    refused = CliRunner().invoke(ckpt, ["convert", str(files / "a.pt"), str(tmp_path / "c.pt")])
    assert "or give --trust, which runs the code that it names: training_code.Holder" in str(
        refused.exception
    )
    done = CliRunner().invoke(
        ckpt, ["convert", str(files / "a.pt"), str(tmp_path / "c.pt"), "--trust"]
    )
    assert done.exit_code == 0, done.output
    assert (files / "was-run").exists()
    # What the code prints would be taken for a part of what --json prints.
    assert capfd.readouterr().out == ""
    names = "training_code.Holder, training_code.Opaque"
    assert done.stderr.startswith(f"running code that {files / 'a.pt'} names: {names}\n")
    assert "left out: opaque: it is a training_code.Opaque" in done.stderr
    written = torch.load(tmp_path / "c.pt", weights_only=True)
    assert torch.equal(written["model"]["weights"], torch.arange(6.0))
    assert written["step"] == 4


def test_code_that_fails_is_told(files: Path, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes((files / "a.pt").read_bytes())
    done = CliRunner().invoke(
        ckpt, ["convert", str(tmp_path / "a.pt"), str(tmp_path / "c.pt"), "--trust"]
    )
    assert "could not load it: ModuleNotFoundError: No module named 'training_code'" in str(
        done.exception
    )
