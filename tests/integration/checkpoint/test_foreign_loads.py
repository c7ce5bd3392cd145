"""Loads of other tools' checkpoints by `checkpoint.load`, without a conversion before."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from keepstep import checkpoint
from keepstep.checkpoint.errors import CheckpointMissing, LayoutMismatch, RankFailed
from tests.ranks import act_in_groups, run_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 31, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(ids)))


def build(seed: int, sharded: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    if sharded:
        fully_shard(model)
    return model, torch.optim.AdamW(model.named_parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ids = torch.arange(31)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids), ids).backward()
        optimizer.step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    slots = [
        slot
        for parameter in model.parameters()
        for slot in (optimizer.state[parameter]["exp_avg"], optimizer.state[parameter]["step"])
    ]
    return [whole(tensor) for tensor in (*model.parameters(), *slots)]


def save_file(path: Path) -> list[torch.Tensor]:
    model, optimizer = build(0)
    train(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    torch.save(state, path)
    return values(model, optimizer)


@pytest.mark.parametrize("prefix", ["", "torch:"])
def test_a_file_of_torch_is_loaded(tmp_path: Path, prefix: str) -> None:
    expected = save_file(tmp_path / "a.pt")
    model, optimizer = build(1)
    state = {"model": model, "optimizer": optimizer}
    assert checkpoint.load(f"{prefix}{tmp_path / 'a.pt'}", state) == 2
    assert all(map(torch.equal, values(model, optimizer), expected))


@pytest.mark.parametrize("prefix", ["", "torch:"])
def test_a_step_that_is_given_is_that_of_the_file(tmp_path: Path, prefix: str) -> None:
    save_file(tmp_path / "a.pt")
    state = {"model": build(1)[0]}
    assert checkpoint.load(f"{prefix}{tmp_path / 'a.pt'}", state, step=2) == 2
    with pytest.raises(CheckpointMissing, match=r"step 3 is wanted, and .* of step 2"):
        checkpoint.load(f"{prefix}{tmp_path / 'a.pt'}", state, step=3)


def test_a_step_that_is_missing_is_not_looked_for_in_other_tools_files(tmp_path: Path) -> None:
    state = {"model": build(0)[0]}
    checkpoint.save(str(tmp_path), state, step=1)
    (tmp_path / ".metadata").write_bytes(b"of DCP")
    with pytest.raises(CheckpointMissing):
        checkpoint.load(str(tmp_path), state, step=3)


def test_names_of_a_wrapper_in_a_file_are_taken_off(tmp_path: Path) -> None:
    model, _ = build(0)
    wrapped = nn.DataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.named_parameters(), lr=0.1)
    train(model, optimizer)
    state = {"model": wrapped.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "a.pt")
    other, other_optimizer = build(1)
    checkpoint.load(str(tmp_path / "a.pt"), {"model": other, "optimizer": other_optimizer})
    expected = values(model, optimizer)
    assert all(map(torch.equal, values(other, other_optimizer), expected))


def test_a_part_of_the_model_with_a_wrappers_name_keeps_it(tmp_path: Path) -> None:
    saved, other = (nn.ModuleDict({"module": nn.Linear(3, 3)}) for _ in range(2))
    torch.save(saved.state_dict(), tmp_path / "a.pt")
    checkpoint.load(str(tmp_path / "a.pt"), {"model": other})
    assert all(map(torch.equal, other.parameters(), saved.parameters()))


def test_what_is_not_carried_is_listed_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = build(0)
    torch.save({"model": model.state_dict(), "sampler": object}, tmp_path / "a.pt")
    other, _ = build(1)
    with caplog.at_level(logging.WARNING, "keepstep"):
        checkpoint.load(str(tmp_path / "a.pt"), {"model": other})
    assert "left out sampler" in caplog.text


def test_nothing_there_is_still_a_missing_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMissing):
        checkpoint.load(str(tmp_path / "none"), {"model": Model()})


def test_a_load_that_fails_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    save_file(tmp_path / "a.pt")
    model = nn.Sequential(nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(LayoutMismatch):
        checkpoint.load(str(tmp_path / "a.pt"), {"model": model, "optimizer": optimizer})
    assert not optimizer.state


class RenamedSource(nn.Module):
    """The same model in another spelling: two halves of the middle layer are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(31, 6)
        self.upper = nn.Linear(6, 3)
        self.lower = nn.Linear(6, 3)
        self.head = nn.Linear(6, 31, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        embedded = self.tokens(ids)
        return self.head(torch.cat([self.upper(embedded), self.lower(embedded)], dim=-1))


RULES = """
[[rule]]
match = "middle.{leaf:weight|bias}"
rename = ["upper.{leaf}", "lower.{leaf}"]
parts = { upper = 3, lower = 3 }

[[rule]]
match = "embedding.weight"
rename = "tokens.weight"

[[rule]]
match = "head.weight"
"""


def renamed_source(sharded: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = RenamedSource()
    if sharded:
        fully_shard(model)
    return model, torch.optim.AdamW(model.named_parameters(), lr=0.1)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    found = []
    for _ in range(3):
        train(model, optimizer)
        ids = torch.arange(31)
        found.append(float(nn.functional.cross_entropy(model(ids), ids).detach()))
    return found


def load_respelled(
    url: str, rules: Path, sharded: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer]:
    rules.write_text(RULES)
    model, optimizer = renamed_source(sharded)
    checkpoint.load(url, {"model": model, "optimizer": optimizer}, rules=str(rules))
    return model, optimizer


@pytest.mark.parametrize("is_keepsteps", [True, False])
def test_by_rules_another_spelling_goes_on_with_the_same_training(
    tmp_path: Path, is_keepsteps: bool
) -> None:
    model, optimizer = build(0)
    train(model, optimizer)
    url = str(tmp_path / "a.pt")
    if is_keepsteps:
        url = str(tmp_path / "run")
        checkpoint.save(url, {"model": model, "optimizer": optimizer}, step=2)
    else:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, url)
    other, other_optimizer = load_respelled(url, tmp_path / "rules.toml")
    assert losses(other, other_optimizer) == pytest.approx(losses(model, optimizer), rel=1e-5)


def test_what_rules_do_not_lead_to_is_missing(tmp_path: Path) -> None:
    save_file(tmp_path / "a.pt")
    (tmp_path / "rules.toml").write_text('[[rule]]\nmatch = "{rest...}"\n')
    with pytest.raises(LayoutMismatch, match=r"tokens.weight, .*: missing"):
        checkpoint.load(
            str(tmp_path / "a.pt"),
            {"model": renamed_source()[0]},
            rules=str(tmp_path / "rules.toml"),
        )


def run_by_rules(rank: int, root: str) -> None:
    expected = torch.load(f"{root}/expected.pt", weights_only=True)

    def load() -> None:
        for url in (f"{root}/run", f"{root}/a.pt"):
            loaded = values(*load_respelled(url, Path(root, f"{rank}.toml"), sharded=True))
            assert all(map(torch.equal, loaded, expected))

    act_in_groups(rank, root, (2, load))


def test_ranks_read_by_rules_what_they_have_of_the_other_spelling(tmp_path: Path) -> None:
    save_file(tmp_path / "a.pt")
    model, optimizer = build(0)
    train(model, optimizer)
    checkpoint.save(str(tmp_path / "run"), {"model": model, "optimizer": optimizer}, step=2)
    alone = values(*load_respelled(str(tmp_path / "a.pt"), tmp_path / "rules.toml"))
    assert not any(map(torch.equal, alone[:2], renamed_source()[0].parameters()))
    torch.save(alone, tmp_path / "expected.pt")
    run_ranks(run_by_rules, (str(tmp_path),), nprocs=2)


def run(rank: int, root: str) -> None:
    def save() -> None:
        model, optimizer = build(0, sharded=True)
        train(model, optimizer)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=f"{root}/dcp")

    def load() -> None:
        expected_model, expected_optimizer = build(0, sharded=True)
        train(expected_model, expected_optimizer)
        expected = values(expected_model, expected_optimizer)
        for url in (f"{root}/dcp", f"{root}/a.pt"):
            model, optimizer = build(1, sharded=True)
            checkpoint.load(url, {"model": model, "optimizer": optimizer})
            for got, want in zip(values(model, optimizer), expected, strict=True):
                torch.testing.assert_close(got, want)
        if rank == 1:
            Path(root, "dcp", "__0_0.distcp").rename(Path(root, "dcp", "gone"))
        torch.distributed.barrier()
        with pytest.raises((checkpoint.CheckpointError, RankFailed)):
            checkpoint.load(f"{root}/dcp", {"model": build(1, sharded=True)[0]})

    act_in_groups(rank, root, (3, save), (2, load))


def test_ranks_load_their_own_boxes_of_what_others_wrote(tmp_path: Path) -> None:
    save_file(tmp_path / "a.pt")
    run_ranks(run, (str(tmp_path),), nprocs=3)


def test_a_directory_may_have_the_name_of_a_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, _ = build(0)
    checkpoint.save("torch", {"model": model}, step=4)
    assert checkpoint.load("torch", {"model": build(1)[0]}) == 4
