"""Claims about the documents of several ranks: what is merged, and whose are needed for it."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.documents import (
    SCALARS,
    TIED,
    VALUES,
    document_digests,
    last_holders,
    merged_documents,
)

contents = st.integers(0, 2)
merged_by_entry = st.dictionaries(st.sampled_from("ab"), contents, max_size=2)
documents_of_rank = st.fixed_dictionaries(
    {},
    optional={
        "data": contents,
        VALUES: merged_by_entry,
        SCALARS: merged_by_entry,
        TIED: merged_by_entry,
    },
)


@given(st.lists(documents_of_rank, max_size=6))
def test_documents_that_no_later_rank_has_alike_are_all_that_merging_needs(
    documents: list[Mapping[str, Json]],
) -> None:
    digests = [document_digests(own) for own in documents]
    last = last_holders(digests)
    needed = [
        {name: own[name] for name, digest in named.items() if last[name, digest] == rank}
        for rank, (own, named) in enumerate(zip(documents, digests, strict=True))
    ]
    assert merged_documents(needed) == merged_documents(documents)
    distinct = {(name, str(own[name])) for own in documents for name in own}
    assert sum(map(len, needed)) == len(distinct)


def test_documents_that_differ_have_other_digests() -> None:
    digests = document_digests({"a": [1], "b": [1], "c": [True], "d": None})
    assert digests["a"] == digests["b"]
    assert len(set(digests.values())) == 3


def test_values_that_only_some_ranks_give_are_kept_and_of_one_name_the_last_counts() -> None:
    of_ranks: list[dict[str, Json]] = [
        {VALUES: {"epoch": 7, "loss": 0.5}},
        {VALUES: {"loss": 0.25, "rank 1/position": 40}},
        {VALUES: {}},
    ]
    merged = merged_documents(of_ranks)
    assert merged == {VALUES: {"epoch": 7, "loss": 0.25, "rank 1/position": 40}}
    assert of_ranks[0] == {VALUES: {"epoch": 7, "loss": 0.5}}
