"""Gives torchtitan's Trainer micro-batches, in an order that the number of ranks leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import tyro
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer

from keepstep.elastic.data.packed import PackedRow
from keepstep.elastic.errors import UsageError
from keepstep.elastic.trainer.attached import Attached
from keepstep.integrations.torchtitan.tokens import TokenFile

MakeRows = Callable[[BaseTokenizer, int], Any]
"""Makes what `keepstep.Attached.batches` reads, of the tokenizer and a number of tokens.

Its samples are sequences of so many token ids, or rows of `keepstep.Packed`. The number is that of
a training sequence and one more, as each token is to predict the next one.
"""


class KeepstepDataLoader(BaseDataLoader):  # type: ignore[misc]
    """Yields this rank's share of each global batch, from the position of the state on.

    `KeepstepCheckpointManager` says where that is. Epochs follow one another until
    `training.steps`.

    Raises:
        UsageError: there is no dataset, or there are two.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """Says what is read: `dataset_path` is a `.npy` file of token ids in one dimension."""

        rows: Annotated[MakeRows | None, tyro.conf.Suppress] = None
        """Makes the dataset in place of `dataset_path`."""

        shuffle: bool = True
        """Permute each epoch by `debug.seed`."""

        num_workers: int = 0
        """Number of processes that read."""

        pin_memory: bool = False
        """Copy batches to pinned memory."""

    def __init__(
        self,
        config: Config,
        *,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        if (config.rows is None) == (config.dataset_path is None):
            raise UsageError(
                "give --dataloader.dataset_path, a .npy file of token ids, or rows= to "
                "keepstep.integrations.torchtitan.protected, and not both"
            )
        length = seq_len + 1
        self._rows = (
            TokenFile(config.dataset_path, length)
            if config.rows is None
            else config.rows(tokenizer, length)
        )
        self._config = config
        self._micro_batch = local_batch_size
        self._attached: Attached | None = None
        self._training: Any = None

    def follow(self, attached: Attached, training: Any) -> None:
        """Set whose position is read from, and torchtitan's `TrainingConfig`."""
        self._attached, self._training = attached, training

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield the micro-batches of the steps that are left."""
        attached = self._attached
        assert attached is not None, "only after `follow`"
        batches = attached.batches(
            self._rows,
            self._training.global_batch_size,
            micro_batch=self._micro_batch,
            steps=self._training.steps,
            shuffle=self._config.shuffle,
            collate=collate,
            workers=self._config.num_workers,
            loader_options={"pin_memory": self._config.pin_memory},
        )
        while True:
            # Trainer has done all that follows a step, and has not begun to count the next one.
            attached.end_if_over()
            micro_batches = next(batches, None)
            if micro_batches is None:
                return
            for micro_batch in micro_batches:
                yield micro_batch.batch

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the position is part of the state that is protected."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin with the first sample, as after a checkpoint of torchtitan."""


def collate(rows: Sequence[Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return inputs with their positions, and the tokens that follow them, as torchtitan's loaders.

    Positions begin at 0 in each document, and no document's last token predicts the next one's
    first.

    Args:
        rows: sequences of tokens, of one document each, or `PackedRow`s.
    """
    if isinstance(rows[0], PackedRow):
        tokens = torch.stack([row.tokens for row in rows])
        documents = torch.stack([row.documents for row in rows])
    else:
        tokens = torch.stack([torch.as_tensor(row).to(torch.int64) for row in rows])
        documents = torch.zeros_like(tokens)
    begins = documents.diff(dim=1) != 0
    places = torch.arange(tokens.shape[1] - 1).expand(len(rows), -1)
    first = torch.zeros_like(places)
    first[:, 1:] = torch.where(begins[:, :-1], places[:, 1:], 0).cummax(dim=1).values
    labels = tokens[:, 1:].masked_fill(begins, IGNORE_INDEX)
    return {"input": tokens[:, :-1], "positions": places - first}, labels
