"""Tests of which stored objects may equal one that is to be written."""

from __future__ import annotations

from keepstep.checkpoint.format.stored.last_part import EqualObjects, LastPart, Paths, WrittenPart
from keepstep.checkpoint.format.stored.listings import ChunkObject
from keepstep.checkpoint.format.stored.object_names import StoredStep

CHUNK, CHANGED = (ChunkObject("model/a/c.0", 8, checksums) for checksums in (b"old!", b"new!"))
LAST = WrittenPart(StoredStep(1, 0), {CHUNK: "last/c.0"})


def found(item: ChunkObject, last: WrittenPart | None, newest: Paths) -> list[str]:
    return list(EqualObjects(last, lambda: newest).find(item))


def test_what_the_writer_wrote_last_comes_before_what_others_wrote() -> None:
    assert found(CHUNK, LAST, {}) == ["last/c.0"]
    assert found(CHUNK, LAST, {CHUNK: "newest/c.0"}) == ["last/c.0", "newest/c.0"]
    assert found(CHUNK, None, {CHUNK: "newest/c.0"}) == ["newest/c.0"]


def test_no_object_is_tried_twice() -> None:
    assert found(CHUNK, LAST, {CHUNK: "last/c.0"}) == ["last/c.0"]


def test_what_has_other_checksums_has_to_be_written() -> None:
    assert found(CHANGED, LAST, {CHUNK: "newest/c.0"}) == []


def test_the_newest_checkpoint_is_looked_for_once_and_only_if_it_is_needed() -> None:
    looks: list[None] = []

    def look() -> Paths:
        looks.append(None)
        return {}

    equal = EqualObjects(LAST, look)
    assert next(equal.find(CHUNK)) == "last/c.0"
    assert looks == []
    for _ in range(3):
        assert list(equal.find(CHANGED)) == []
    assert looks == [None]


def test_a_writer_knows_what_it_wrote_last_under_one_url() -> None:
    last = LastPart()
    assert last.at("a") is None
    last.note("a", LAST)
    assert (last.at("a"), last.at("b")) == (LAST, None)
    last.note("b", LAST)
    assert (last.at("a"), last.at("b")) == (None, LAST)
