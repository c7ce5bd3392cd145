"""Makes `tests/foreign_fixtures/torchtitan`: a checkpoint of torchtitan, and what it holds.

Run where torchtitan is installed, as `make convert-test ONLY=torchtitan` installs it (tried with
torchtitan 0.3.0 and torch 2.13, on CPUs):

    python -m tests.foreign_fixtures.make_torchtitan tests/foreign_fixtures

The model is a Llama of one layer whose q, k and v are fused. What its files hold under Hugging
Face's names is torchtitan's own conversion, of the parameters and of the optimizer's state.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch

from tests.convert.checks import adam_state
from tests.convert.torchtitan import SMALL_CASE, saved, split


def main() -> None:
    directory = Path(sys.argv[1]) / "torchtitan"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    case = SMALL_CASE
    model, optimizer = saved(case, directory)
    live = dict(model.state_dict())
    moments = adam_state(model, optimizer)
    adapter = case.adapter(case.config(), None)
    hub = {f"model/{name}": tensor.contiguous() for name, tensor in adapter.to_hf(live).items()}
    for slot in ("exp_avg", "exp_avg_sq"):
        state = {n: moments[f"optim/{n}/{slot}"] for n, _ in model.named_parameters()}
        for name, tensor in adapter.to_hf(split(model, state)).items():
            hub[f"optim/{name}/{slot}"] = tensor.contiguous()
    state = {f"model/{name}": tensor.contiguous() for name, tensor in live.items()} | moments
    expected = {"state": state, "hub": hub, "config": case.hub_config}
    torch.save(expected, directory / "expected.pt")


if __name__ == "__main__":
    main()
