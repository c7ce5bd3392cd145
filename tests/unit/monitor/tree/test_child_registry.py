"""Claims about children: the file of their URLs, and which of them are asked for records."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from keepstep.monitor.errors import MonitorError
from keepstep.monitor.tree.child_registry import ChildRegistry, ChildrenFile, Cursor
from keepstep.monitor.tree.summary import Summary


def test_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "rack1"
    path.write_text("http://a:1\n\nhttp://b:1  # the old one\n# none\n")
    file = ChildrenFile(path)
    assert file.urls() == ("http://a:1", "http://b:1")
    path.write_text("http://c:1\n")
    assert file.urls() == ("http://c:1",)
    path.unlink()
    # It is being replaced: the previous list remains.
    assert file.urls() == ("http://c:1",)


def test_unreadable_file_is_logged_once_and_the_last_valid_list_remains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rack1"
    path.write_text("http://a:1\n")
    file = ChildrenFile(path)
    path.write_bytes(b"http://\xff:1\n")
    for _ in range(3):
        assert file.urls() == ("http://a:1",)
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    path.unlink()
    path.mkdir()
    for _ in range(3):
        assert file.urls() == ("http://a:1",)
    assert len(caplog.records) == 2
    path.rmdir()
    path.write_text("http://b:1\n")
    assert file.urls() == ("http://b:1",)


def test_file_that_cannot_be_read_at_the_start_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(MonitorError, match=os.fspath(path)):
            ChildrenFile(path)


def answer(number: int, *, has_records: bool, incarnation: str = "x") -> Summary:
    return Summary(
        incarnation=incarnation, number=number, present=(), ranks=(), communicators=(), nodes=(),
        has_records=has_records,
    )  # fmt: skip


def asked_for_records(cursors: Mapping[str, Cursor]) -> set[str]:
    return {url for url, cursor in cursors.items() if cursor.records_since is not None}


def test_children_take_turns_to_send_records_and_each_goes_on_where_it_was() -> None:
    registry = ChildRegistry()
    urls = ["a", "b", "c", "d"]
    for first, url in enumerate(urls):
        ranks = range(100 * first, 100 * first + 100)
        registry.record_answer(url, answer(1, has_records=True), ranks, float(first))
    turns = []
    for round_number in range(2, 6):
        cursors = registry.cursors(urls, 200)
        asked = asked_for_records(cursors)
        turns.append(asked)
        for url in urls:
            assert cursors[url].since == round_number - 1
            assert cursors[url].records_since in (None, max(1, round_number - 2))
            reply = answer(round_number, has_records=url in asked)
            registry.record_answer(url, reply, registry._children[url].ranks, round_number + 5.0)
        assert registry.records_age_s(next(iter(range(100)))) == (0.0 if "a" in asked else 1.0)
    assert turns == [{"a", "b"}, {"c", "d"}] * 2


def test_one_child_with_more_ranks_than_may_send_records_at_once_is_asked_for_them() -> None:
    registry = ChildRegistry()
    registry.record_answer("a", answer(1, has_records=True), range(5000), 1.0)
    registry.record_answer("b", answer(1, has_records=True), range(5000, 9000), 2.0)
    assert asked_for_records(registry.cursors(["a", "b"], 1000)) == {"a"}


def test_records_of_a_new_incarnation_are_requested_from_its_beginning() -> None:
    registry = ChildRegistry()
    registry.record_answer("a", answer(7, has_records=True), range(10), 1.0)
    registry.record_answer("b", answer(7, has_records=True), range(10, 20), 0.0)
    restarted = answer(2, has_records=False, incarnation="y")
    assert not registry.record_answer("a", restarted, range(10), 2.0)
    assert registry.cursors(["a", "b"], 1)["a"] == Cursor("y", 2, 0)


def test_rank_belongs_to_the_child_that_reported_it_last() -> None:
    registry = ChildRegistry()
    registry.record_answer("a", answer(1, has_records=True), (0, 1), 1.0)
    registry.record_answer("b", answer(1, has_records=True), (1, 2), 1.0)
    assert [registry.url_of_rank(rank) for rank in range(4)] == ["a", "b", "b", None]
    registry.record_answer("a", answer(2, has_records=True), (0,), 1.0)
    assert registry.url_of_rank(1) == "b"
    registry.release(["a"])
    assert [registry.url_of_rank(rank) for rank in range(3)] == ["a", None, None]
