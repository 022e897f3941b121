"""Micro-batches of one data-parallel rank, starting after any number of consumed samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import torch

from mpbridge.common.errors import DataError
from mpbridge.common.report.console import rank
from mpbridge.common.report.progress import bar
from mpbridge.settings.training import train_iters
from mpbridge.training.data.datasets import Corpus, open_corpus

if TYPE_CHECKING:
    from mpbridge.backend.engines.contract import Batch
    from mpbridge.settings.container import Run

FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


class Feed:
    """Everything a run reads: opened once, then provides batches of a split from any position.

    dataset: a user's own iterable for training, instead of the corpus; its samples are mappings with 'tokens'
    (one token longer than a sample if 'labels' is omitted). Its length is never used: `train_iters` decides.
    """

    def __init__(self, run: Run, dataset: Iterable[Mapping[str, torch.Tensor]] | None = None) -> None:
        self.run, self.dataset = run, dataset
        self.seq_length, self.vocab_size = run.facts.shape.seq_length, run.facts.shape.vocab_size
        seed = int(run.train.get("seed", 1234))
        # a run on the user's own iterable, without evaluation, needs no corpus
        wanted = dataset is None or bool(run.train.get("eval_interval") and run.train.get("eval_iters"))
        self.corpus: Corpus | None = None
        if wanted:
            with bar("packing the corpus", quiet=rank() != 0) as told:
                self.corpus = open_corpus(
                    run.data,
                    seq_length=self.seq_length,
                    seed=seed,
                    vocab_size=self.vocab_size,
                    code=run.container.may_be_code("data.tokenizer"),
                    told=told,
                )
        self._opened: dict[str, Any] = {}

    def batches(self, split: str, consumed: int = 0, dp_rank: int = 0, dp_size: int = 1) -> Iterator[Batch]:
        """Endless micro-batches of this data-parallel rank, starting after `consumed` samples of the whole run.

        Sample i belongs to global step i // global_batch_size; within it, runs of micro_batch_size go to the ranks in turn.
        """
        micro = int(self.run.train["micro_batch_size"])
        if split == "train" and self.dataset is not None:
            return self._streamed(self.dataset, consumed, micro, dp_rank, dp_size)
        if split not in self._opened:
            assert self.corpus is not None
            self._opened[split] = self.corpus.dataset(split, self._samples(split))
        return self._indexed(self._opened[split], consumed, micro, dp_rank, dp_size)

    def mark(self, consumed: int) -> str:
        """A digest of some of the first `consumed` training samples: a different digest means another corpus, or another order.

        Empty if nothing was consumed, and for the user's own iterable. Every rank calls it.
        """
        if self.dataset is not None or not consumed:
            return ""
        self.batches("train")
        dataset, found = self._opened["train"], hashlib.sha256()
        for index in (0, consumed // 2, consumed - 1):
            found.update(dataset[index % len(dataset)]["tokens"].numpy().tobytes())
        return found.hexdigest()[:16]

    def _samples(self, split: str) -> int:
        train = self.run.train
        steps = train_iters(train)
        if split != "train":
            steps = int(train.get("eval_iters") or 1)
        return steps * int(train["global_batch_size"])

    def _indexed(self, dataset: Any, consumed: int, micro: int, rank: int, size: int) -> Iterator[Batch]:
        length = len(dataset)
        for start in count(consumed + rank * micro, micro * size):
            yield self._batch([dataset[index % length] for index in range(start, start + micro)])

    def _streamed(self, dataset: Iterable[Any], consumed: int, micro: int, rank: int, size: int) -> Iterator[Batch]:
        samples = islice(_again(dataset), consumed + rank * micro, None)
        while True:
            # islice, not list(): list() would call len()
            yield self._batch([_complete(sample, self.seq_length) for sample in islice(samples, micro)])
            next(islice(samples, micro * (size - 1), micro * (size - 1)), None)

    def _batch(self, samples: list[Mapping[str, torch.Tensor]]) -> Batch:
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in FIELDS}
        largest = int(batch["tokens"].max())
        if largest >= self.vocab_size:
            raise DataError(
                f"token {largest} in the data, but model.vocab_size={self.vocab_size}: it was written with another tokenizer"
            )
        return batch


def _again(dataset: Iterable[Any]) -> Iterator[Any]:
    """The samples of `dataset` over and over. Raises DataError if one round yields none."""
    total = 0
    while True:
        before = total
        for sample in dataset:
            total += 1
            yield sample
        if total == before:
            raise DataError(
                f"the training dataset ended after {total} samples and cannot be started again; make it longer or re-iterable"
            )


def _complete(sample: Mapping[str, torch.Tensor], length: int) -> Mapping[str, torch.Tensor]:
    tokens = sample["tokens"]
    labels = sample.get("labels")
    if labels is None:
        tokens, labels = tokens[:-1], tokens[1:]
    if tokens.shape != (length,) or labels.shape != (length,):
        raise DataError(
            f"a sample of the training dataset has shape {tuple(tokens.shape)}, expected ({length},) = (data.seq_length,)"
        )
    mask = sample.get("loss_mask")
    places = sample.get("position_ids")
    return {
        "tokens": tokens.long(),
        "labels": labels.long(),
        "loss_mask": torch.ones(length) if mask is None else mask.float(),
        "position_ids": torch.arange(length) if places is None else places.long(),
    }
