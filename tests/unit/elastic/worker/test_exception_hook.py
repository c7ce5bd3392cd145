"""Claims about the hook that shows exceptions, in a process that has one group after another."""

from __future__ import annotations

import sys

import pytest

from keepstep.elastic.worker.exception_hook import RankPrefix, kept_hook

shown: list[str] = []


def own_hook(*_: object) -> None:
    shown.append("own")


def add_prefix(rank: int) -> None:
    """Do what `torch.distributed.init_process_group` does to the hook."""
    below = sys.excepthook

    def prefixed(*arguments: object) -> None:
        shown.append(f"[rank{rank}]")
        below(*arguments)  # type: ignore[arg-type]

    sys.excepthook = prefixed


def shown_now() -> list[str]:
    shown.clear()
    sys.excepthook(ValueError, ValueError(), None)
    return list(shown)


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", own_hook)


def test_only_the_newest_group_has_a_prefix() -> None:
    prefix = RankPrefix()
    for rank in (0, 2, 1):
        with prefix.replaced():
            add_prefix(rank)
        assert shown_now() == [f"[rank{rank}]", "own"]


def test_hook_that_the_script_sets_between_groups_stays() -> None:
    prefix = RankPrefix()
    with prefix.replaced():
        add_prefix(0)
    sys.excepthook = lambda *_: shown.append("of the script")
    for rank in (1, 2):
        with prefix.replaced():
            add_prefix(rank)
        assert shown_now() == [f"[rank{rank}]", "of the script"]


def test_group_that_is_not_created_leaves_no_prefix() -> None:
    prefix = RankPrefix()
    with prefix.replaced():
        add_prefix(0)
    with pytest.raises(RuntimeError), prefix.replaced():
        raise RuntimeError("a peer is gone")
    assert shown_now() == ["own"]


def test_group_to_warm_up_leaves_no_prefix() -> None:
    with kept_hook():
        add_prefix(0)
    assert shown_now() == ["own"]
