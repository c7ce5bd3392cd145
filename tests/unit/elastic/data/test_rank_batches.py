"""Claims about a loader's share of batches: it resumes within an epoch, for any number of ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.elastic.data.order import DataOrder
from keepstep.elastic.data.rank_batches import RankBatches


@given(
    samples=st.integers(8, 60),
    global_batch=st.integers(4, 8),
    epochs=st.integers(1, 4),
    resumed=st.data(),
)
def test_loop_over_epochs_reads_each_batch_once_wherever_it_resumes(
    samples: int, global_batch: int, epochs: int, resumed: st.DataObject
) -> None:
    order = DataOrder(samples, global_batch, seed=3)
    total = epochs * order.steps_per_epoch
    consumed = start = resumed.draw(st.integers(0, total))
    world_size = resumed.draw(st.integers(1, global_batch))
    # An epoch that is resumed within resumes once on each rank; one that begins does not.
    resumptions = [None] * world_size if start % order.steps_per_epoch else []
    batches = [
        RankBatches(
            order,
            lambda: consumed,
            lambda rank=rank: (rank, world_size),  # type: ignore[misc]
            epochs=epochs,
            on_resume=resumptions.pop,
        )
        for rank in range(world_size)
    ]
    read: list[int] = []
    for _ in range(epochs):
        assert {sampler.epoch for sampler in batches} == {consumed // order.steps_per_epoch}
        for shares in zip(*batches, strict=True):
            read += [index for share in shares for index in share]
            consumed += 1
    assert consumed == total
    assert resumptions == []
    assert read == [index for step in range(start, total) for index in order.indices(step)]
