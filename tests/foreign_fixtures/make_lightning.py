"""Makes `tests/foreign_fixtures/lightning`: a file of Lightning, and what it holds.

Run where Lightning is installed, as `make convert-test ONLY=lightning` installs it (tried with
lightning 2.6.6 and torch 2.13, on CPUs):

    python -m tests.foreign_fixtures.make_lightning tests/foreign_fixtures
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import torch

from tests.convert.checks import adam_state
from tests.convert.lightning import fitted


def main() -> None:
    directory = Path(sys.argv[1]) / "lightning"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for kind in ("groups", "several"):
        with tempfile.TemporaryDirectory() as work:
            module, optimizers = fitted(kind, True, Path(work), has_callback=False)
            shutil.move(Path(work, "last.ckpt"), directory / f"{kind}.ckpt")
        state = {f"model/{name}": tensor for name, tensor in module.state_dict().items()}
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        ordered = []
        for optimizer in optimizers:
            state |= adam_state(module, optimizer)
            ordered += [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        del state["model/net.head.weight"]
        torch.save({"state": state, "names": ordered}, directory / f"{kind}.expected.pt")


if __name__ == "__main__":
    main()
