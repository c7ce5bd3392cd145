"""Claims about partitions: every place of a batch has one, and every rank knows those of its."""

from hypothesis import given
from hypothesis import strategies as st

from keepstep.elastic.data.order import share
from keepstep.elastic.data.partitions import Partitioning


@given(st.integers(1, 60), st.data())
def test_each_place_of_a_global_batch_is_of_one_partition(
    global_batch: int, data: st.DataObject
) -> None:
    partitioning = Partitioning(global_batch, data.draw(st.integers(1, global_batch)))
    places = [partitioning.places(number) for number in range(partitioning.count)]
    assert [place for own in places for place in own] == list(range(global_batch))
    assert all(places)


@given(st.integers(1, 60), st.data())
def test_a_rank_reads_the_partitions_that_overlap_its_share_and_no_others(
    global_batch: int, data: st.DataObject
) -> None:
    partitioning = Partitioning(global_batch, data.draw(st.integers(1, global_batch)))
    world_size = data.draw(st.integers(1, global_batch))
    for rank in range(world_size):
        own = set(range(*share(global_batch, rank, world_size)))
        assert list(partitioning.of_rank(rank, world_size)) == [
            number for number in range(partitioning.count) if own & set(partitioning.places(number))
        ]
