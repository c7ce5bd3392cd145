"""Claims about when ranks follow the plan of the last save, and about failures of one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest
import torch

from keepstep.checkpoint.errors import CheckpointError, LayoutMismatch, RankFailed
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.documents import document_digests
from keepstep.checkpoint.format.stored import chunking
from keepstep.checkpoint.format.stored.shared_plan import plan_share
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor, describe
from keepstep.checkpoint.ranks import collective, collective_plan, piece_exchange
from keepstep.checkpoint.ranks.collective_plan import (
    AgreedSave,
    PlanCache,
    SharedPlan,
    agree_on_save,
    signature_of,
)
from keepstep.checkpoint.ranks.piece_exchange import PieceExchange
from tests.unit.checkpoint.thread_ranks import ThreadRanks


def state(**shapes: tuple[int, ...]) -> LiveState:
    tensors = [describe(key, torch.zeros(shape)) for key, shape in shapes.items()]
    return LiveState(tuple(tensors), {})


def test_a_plan_is_followed_while_the_boxes_stay_and_made_anew_when_they_change() -> None:
    cache = PlanCache()
    first = agree_on_save(lambda: state(a=(4, 3), b=()), None, cache)
    again = agree_on_save(lambda: state(a=(4, 3), b=()), None, cache)
    assert again.plan is first.plan
    assert again.attempt != first.attempt
    for changed in (state(a=(4, 3)), state(b=(), a=(4, 3)), state(a=(3, 4), b=())):
        assert agree_on_save(lambda s=changed: s, None, cache).plan is not first.plan


def test_a_plan_is_made_anew_when_the_compression_changes() -> None:
    def plan(compression: Literal["zstd"] | None) -> SharedPlan:
        return agree_on_save(lambda: state(a=(512, 1024)), None, cache, compression).plan

    cache = PlanCache()
    plain = plan(None)
    compressed = plan("zstd")
    assert (plain.own.tensors["a"].compression, plain.tensors.tensors["a"].compression) == (
        None, None
    )  # fmt: skip
    assert compressed.own.tensors["a"].compression == "zstd"
    assert compressed.tensors.tensors["a"].compression == "zstd"
    assert plan("zstd") is compressed
    assert plan(None).own.tensors["a"].compression is None


def test_a_compression_that_does_not_exist_is_refused_before_ranks_plan() -> None:
    with pytest.raises(ValueError, match=r"compression='gzip': give 'zstd', or None"):
        agree_on_save(lambda: state(a=(4,)), None, PlanCache(), "gzip")  # type: ignore[arg-type]


def test_a_plan_that_failed_is_not_followed_later() -> None:
    cache = PlanCache()
    agree_on_save(lambda: state(a=(4, 3)), None, cache)
    name = "a/../b"
    with pytest.raises(Exception, match="cannot be part of a name"):
        agree_on_save(lambda: state(**{name: (3,)}), None, cache)
    assert cache.plan_for(signature_of(state(a=(4, 3)).tensors)) is None


def test_a_process_that_becomes_another_rank_does_not_follow_its_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors: tuple[LiveTensor, ...] = state(a=(4, 3)).tensors
    before = signature_of(tensors)
    monkeypatch.setattr(collective_plan, "rank", lambda: 3)
    assert signature_of(tensors) != before


def test_names_that_lie_in_each_other_are_refused_though_no_planner_has_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def blind(*arguments: object) -> tuple[object, object]:
        with monkeypatch.context() as patch:
            patch.setattr(chunking, "check_storable", lambda keys: None)
            return plan_share(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(collective_plan, "plan_share", blind)
    with pytest.raises(LayoutMismatch, match="'a' is a tensor, so 'a/b' cannot lie inside it"):
        agree_on_save(lambda: state(**{"a": (4,), "a/b": (3,)}), None, PlanCache())


def test_data_type_that_cannot_be_stored_is_refused_before_ranks_plan() -> None:
    tensor = torch.zeros(3, dtype=torch.complex32)
    with pytest.raises(LayoutMismatch, match="complex32 cannot be stored"):
        signature_of([describe("a", tensor)])


@pytest.mark.parametrize("different", ["step", "generation"])
def test_ranks_that_save_different_steps_all_raise_before_anything_is_planned(
    monkeypatch: pytest.MonkeyPatch, different: str
) -> None:
    def agree(rank: int) -> object:
        numbers = {"step": 7, "generation": 1}
        numbers[different] += rank
        return agree_on_save(lambda: shard(rank), None, PlanCache(), **numbers)

    ranks = ThreadRanks(3)
    ranks.patch(monkeypatch)
    monkeypatch.delattr(collective_plan, "_plan")
    numbers = "8 of generation 1" if different == "step" else "7 of generation 2"
    for result in ranks.run(agree):
        assert isinstance(result, CheckpointError)
        assert f"rank 1 saves step {numbers}, and rank 0 step 7 of generation 1" in str(result)


def test_of_equal_documents_the_last_rank_sends_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [{"values": value} for value in (1, 2, 1)]
    cache = PlanCache()
    plan = agree_on_save(lambda: state(a=(3,)), None, cache).plan

    def gather(
        prepare: Callable[[], Any], tell: Callable[[Any], Any], _: object
    ) -> tuple[Any, list[Any], list[Any]]:
        prepared = prepare()
        own = tell(prepared)
        gathered = [[*own[:2], document_digests(documents), *own[3:]] for documents in held]
        gathered[collective_plan.rank()] = own
        return prepared, gathered, []

    monkeypatch.setattr(collective_plan, "on_all_ranks_exchanging", gather)
    monkeypatch.setattr(collective_plan, "signature_of", lambda *_: plan.signature)
    sent = []
    for rank, documents in enumerate(held):
        monkeypatch.setattr(collective_plan, "rank", lambda rank=rank: rank)
        live = LiveState(state(a=(3,)).tensors, documents)
        documents = agree_on_save(lambda live=live: live, None, cache).documents
        sent.append({name: value for name, value in documents.items() if name == "values"})
    assert sent == [{}, {"values": 2}, {"values": 1}]


def shard(rank: int) -> LiveState:
    """Return a third of a tensor that is so small that one rank writes all of it."""
    data = torch.full((4, 8), float(rank))
    return LiveState((LiveTensor("w", (12, 8), Box((4 * rank, 0), (4, 8)), data),), {})


def plan_and_gather(rank: int) -> Any:
    return agree_on_save(lambda: shard(rank), None, PlanCache()).exchange.run()


def test_one_rank_collects_the_chunk_that_all_hold_a_part_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = ThreadRanks(3)
    ranks.patch(monkeypatch)
    collected = [item for result in ranks.run(plan_and_gather) for item in result.items()]
    (((key, box), data),) = collected
    assert (key, box) == ("w", Box((0, 0), (12, 8)))
    expected = torch.cat([shard(rank).tensors[0].data for rank in range(3)])
    assert data.tobytes() == expected.numpy().tobytes()


def without_room_for_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave less room beside a message of three ranks than the 128 bytes of a piece of `shard`."""
    monkeypatch.setattr(collective_plan, "room_beside_message", lambda: 127)


@pytest.mark.parametrize(("has_room", "messages"), [(True, 5), (False, 6)])
def test_first_plan_takes_five_messages_with_the_pieces_if_they_are_small(
    monkeypatch: pytest.MonkeyPatch, has_room: bool, messages: int
) -> None:
    ranks = ThreadRanks(3)
    ranks.patch(monkeypatch)
    if not has_room:
        without_room_for_pieces(monkeypatch)
    assert content_of(ranks.run(plan_and_gather)) == content_of_shards()
    assert ranks.collectives[:: ranks.count] == ["all_to_all_single"] * messages


def test_first_plan_takes_four_messages_if_no_rank_lacks_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = ThreadRanks(3)
    ranks.patch(monkeypatch)
    agreed = ranks.run(lambda _: agree_on_save(lambda: state(a=(4, 3)), None, PlanCache()))
    assert [(save.exchange.is_done, save.exchange.run()) for save in agreed] == [(True, {})] * 3
    assert ranks.collectives[:: ranks.count] == ["all_to_all_single"] * 4


@pytest.mark.parametrize("has_room", [True, False])
def test_pieces_arrive_if_one_rank_could_not_prepare_for_them_at_first(
    monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    ranks = ThreadRanks(3)
    ranks.patch(monkeypatch)
    if not has_room:
        without_room_for_pieces(monkeypatch)
    refuse_preparing(monkeypatch, rank=1)
    assert content_of(ranks.run(plan_and_gather)) == content_of_shards()


def content_of(collected: Sequence[Mapping[tuple[str, Box], Any]]) -> list[bytes]:
    """Return the bytes of all chunks that ranks have collected."""
    return [data.tobytes() for chunks in collected for data in chunks.values()]


def content_of_shards() -> list[bytes]:
    """Return the content of the one chunk of all shards."""
    return [torch.cat([shard(rank).tensors[0].data for rank in range(3)]).numpy().tobytes()]


def refuse_preparing(monkeypatch: pytest.MonkeyPatch, *, rank: int) -> None:
    """Let a rank have no memory for the exchange of pieces before the ranks have agreed on it."""
    prepare = PieceExchange.prepare

    def refuse(exchange: PieceExchange) -> None:
        if collective_plan.rank() == rank:
            raise CheckpointError("no memory")
        prepare(exchange)

    monkeypatch.setattr(PieceExchange, "prepare", refuse)


def save_twice(
    monkeypatch: pytest.MonkeyPatch, *, keeps_plan: Callable[[int], bool] = lambda _: True
) -> tuple[list[str], bool]:
    """Return a second save's collectives, and whether it followed the plan of the first.

    The tensors have other values at the second save, which are checked.

    Args:
        keeps_plan: whether a rank still has the plan of the first save.
    """
    ranks = ThreadRanks(3)
    ranks.patch(monkeypatch)
    caches = [PlanCache() for _ in range(3)]
    lives = [shard(rank) for rank in range(3)]

    def save(rank: int) -> tuple[AgreedSave, dict[tuple[str, Box], Any]]:
        agreed = agree_on_save(lambda: lives[rank], None, caches[rank])
        return agreed, agreed.exchange.run()

    first = ranks.run(save)
    ranks.collectives.clear()
    for rank, live in enumerate(lives):
        live.tensors[0].data.mul_(-1).sub_(7)
        if not keeps_plan(rank):
            caches[rank].keep(None)
    second = ranks.run(save)
    collected = {place: data for _, pieces in second for place, data in pieces.items()}
    expected = torch.cat([live.tensors[0].data for live in lives]).numpy().tobytes()
    assert [data.tobytes() for data in collected.values()] == [expected]
    followed = [
        again.plan is before.plan for (again, _), (before, _) in zip(second, first, strict=True)
    ]
    assert len(set(followed)) == 1
    return ranks.collectives[:: ranks.count], followed[0]


def test_small_pieces_go_with_the_message_in_which_ranks_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collectives, is_same_plan = save_twice(monkeypatch)
    assert is_same_plan
    assert collectives == ["all_to_all_single"]


@pytest.mark.parametrize(
    ("least_nbytes", "agreeing"), [(127, "all_to_all_single"), (128, "all_gather")]
)
def test_pieces_that_have_no_room_beside_a_message_go_in_a_round(
    monkeypatch: pytest.MonkeyPatch, least_nbytes: int, agreeing: str
) -> None:
    """Where there is no room for anything, nothing is sent from each rank to each."""
    # A rank's piece has 128 bytes, and each rank has a third of the room.
    monkeypatch.setattr(collective, "_HEADS_NBYTES", 3 * 127)
    monkeypatch.setattr(collective, "_LEAST_ROOM_NBYTES", least_nbytes)
    collectives, is_same_plan = save_twice(monkeypatch)
    assert is_same_plan
    assert collectives == [agreeing, "all_to_all_single"]


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_what_came_beside_a_message_is_not_taken_if_one_rank_plans_anew(
    monkeypatch: pytest.MonkeyPatch, changed: int
) -> None:
    collectives, is_same_plan = save_twice(monkeypatch, keeps_plan=lambda rank: rank != changed)
    assert not is_same_plan
    assert len(collectives) > 2


@pytest.mark.parametrize("lacking", ["reserve", "bytes_of"])
def test_lack_of_memory_for_the_exchange_is_an_error_that_a_save_takes(
    monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    """PyTorch's own is a RuntimeError, which ended the training of the rank that had it."""
    ranks = ThreadRanks(3)
    ranks.patch(monkeypatch)
    without_room_for_pieces(monkeypatch)

    where: Any = piece_exchange.ByteExchange if lacking == "reserve" else piece_exchange
    act: Callable[..., Any] = getattr(where, lacking)

    def lack(*arguments: Any, **sizes: int) -> Any:
        if ranks.get_rank() == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return act(*arguments, **sizes)

    monkeypatch.setattr(where, lacking, lack)
    results = ranks.run(plan_and_gather)
    assert [type(result) for result in results] == [RankFailed, CheckpointError, RankFailed]


@pytest.mark.parametrize(
    ("module", "step"),
    [
        (collective_plan, "plan_share"),
        (collective_plan, "merged_tensor_plan"),
        (collective_plan, "wanted_by_round"),
        (collective_plan, "rounds_of"),
    ],
)
def test_what_fails_between_two_messages_on_one_rank_is_raised_on_all(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, step: str
) -> None:
    act: Callable[..., Any] = getattr(module, step)
    failing_rank = 0 if step == "plan_share" else 1
    ranks = ThreadRanks(3)
    ranks.patch(monkeypatch)

    def failing(*arguments: Any) -> Any:
        if ranks.get_rank() == failing_rank:
            raise MemoryError("out of memory")
        return act(*arguments)

    monkeypatch.setattr(module, step, failing)
    results = ranks.run(plan_and_gather)
    expected = [RankFailed] * 3
    assert [type(result) for result in results] == [
        MemoryError if rank == failing_rank else error for rank, error in enumerate(expected)
    ]


def ranks_that_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[ThreadRanks, Callable[[int], AgreedSave]]:
    """Return three ranks, and what makes each of them agree on a save of its shard."""
    ranks = ThreadRanks(3)
    ranks.patch(monkeypatch)
    caches = [PlanCache() for _ in range(3)]
    return ranks, lambda rank: agree_on_save(lambda: shard(rank), None, caches[rank])


def test_pieces_are_exchanged_without_another_agreement_while_the_plan_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, agree = ranks_that_agree(monkeypatch)
    first = ranks.run(agree)
    again = ranks.run(agree)
    monkeypatch.setattr(piece_exchange, "on_all_ranks", None)
    collected = [
        item
        for result in ranks.run(lambda rank: again[rank].exchange.run())
        for item in result.items()
    ]
    assert [agreed.plan for agreed in again] == [agreed.plan for agreed in first]
    ((_, data),) = collected
    assert data.reshape(-1).view(np.float32).reshape(12, 8)[::4, 0].tolist() == [0.0, 1.0, 2.0]


def test_all_ranks_plan_anew_when_one_lacks_memory_for_the_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, agree = ranks_that_agree(monkeypatch)
    first = ranks.run(agree)
    refuse_preparing(monkeypatch, rank=1)
    again = ranks.run(agree)
    assert len({agreed.plan.name for agreed in again}) == 1
    assert again[0].plan is not first[0].plan
    collected = ranks.run(lambda rank: again[rank].exchange.run())
    assert content_of(collected) == content_of_shards()
