"""Micro-batches of one data-parallel rank, starting after any number of consumed samples, from megatron-core's GPTDataset over a corpus; rank 0 prepares it, the others wait."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

from mpbridge.backend.devices.collectives import on_first_rank
from mpbridge.backend.engines.contract import Batch
from mpbridge.common.errors import DataError
from mpbridge.common.files import ProgressCallback, lock, regular
from mpbridge.common.report.console import rank
from mpbridge.common.report.progress import bar
from mpbridge.settings.container import Run
from mpbridge.settings.training import SPLITS, split_shares, train_iters
from mpbridge.training.data.look import lengths_of, nothing_left, pair_index, too_small
from mpbridge.training.data.prepare import Prepared, cache_folder, prepare
from mpbridge.training.data.sources import find, tokenizer

FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
IGNORED = -100
"""The label of a place that is not learned, as in torch's cross_entropy and transformers' collators."""


class Feed:
    """Everything a run reads: opened once, then provides batches of a split from any position.

    dataset: a user's own iterable for training, instead of the corpus; its samples are mappings with 'tokens'
    (one token longer than a sample if 'labels' is omitted); without 'loss_mask', labels of -100 are not learned. Its length is never used: `train_iters` decides.
    """

    def __init__(self, run: Run, dataset: Iterable[Mapping[str, torch.Tensor]] | None = None) -> None:
        self.run, self.dataset = run, dataset
        self.seq_length, self.vocab_size = run.facts.shape.seq_length, run.facts.shape.vocab_size
        seed = run.train["seed"]
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
        self._taken = 0  # samples of an iterable that cannot begin again

    def batches(self, split: str, consumed: int = 0, dp_rank: int = 0, dp_size: int = 1) -> Iterator[Batch]:
        """Endless micro-batches of this data-parallel rank, starting after `consumed` samples of the whole run.

        Sample i belongs to global step i // global_batch_size; within it, runs of micro_batch_size go to the ranks in turn.
        """
        micro = int(self.run.train["micro_batch_size"])
        if split == "train" and self.dataset is not None:
            return self._streamed(self.dataset, consumed, micro, dp_rank, dp_size)
        if split not in self._opened:
            assert self.corpus is not None
            train = self.run.train
            steps = train_iters(train) if split == "train" else int(train.get("eval_iters") or 1)
            self._opened[split] = self.corpus.dataset(split, steps * int(train["global_batch_size"]))
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

    def _indexed(self, dataset: Any, consumed: int, micro: int, rank: int, size: int) -> Iterator[Batch]:
        length = len(dataset)
        for start in count(consumed + rank * micro, micro * size):
            yield self._batch([dataset[index % length] for index in range(start, start + micro)])

    def _streamed(self, dataset: Iterable[Any], consumed: int, micro: int, rank: int, size: int) -> Iterator[Batch]:
        start = consumed + rank * micro
        if isinstance(dataset, Iterator):
            dataset, start = self._counted(dataset), max(0, start - self._taken)
        samples = islice(_again(dataset), start, None)
        while True:
            # islice, not list(): list() would call len()
            yield self._batch([_complete(sample, self.seq_length) for sample in islice(samples, micro)])
            next(islice(samples, micro * (size - 1), micro * (size - 1)), None)

    def _counted(self, dataset: Iterator[Any]) -> Iterator[Any]:
        for sample in dataset:
            self._taken += 1
            yield sample

    def _batch(self, samples: list[Mapping[str, torch.Tensor]]) -> Batch:
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in FIELDS}
        for name, found in (("token", batch["tokens"]), ("label", batch["labels"][batch["loss_mask"] > 0])):
            if (wrong := found[(found < 0) | (found >= self.vocab_size)]).numel():
                masked = " (what is not to be learned has loss_mask=0, or without a loss_mask the label -100)"
                raise DataError(
                    f"{name} {wrong[0]} in the data, but model.vocab_size={self.vocab_size}: it was written with another tokenizer"
                    + (masked if name == "label" else "")
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
    mask, places = sample.get("loss_mask"), sample.get("position_ids")
    mask = labels != IGNORED if mask is None else mask.reshape(-1)
    for name, part in (("tokens", tokens), ("labels", labels), ("loss_mask", mask)):
        if part.shape != (length,):
            raise DataError(
                f"{name} of a sample of the training dataset: shape {tuple(part.shape)}, expected ({length},) = (data.seq_length,)"
            )
    return {
        "tokens": tokens.long(),
        "labels": labels.long().masked_fill(mask == 0, 0),
        "loss_mask": mask.float(),
        "position_ids": torch.arange(length) if places is None else places.long(),
    }


_UNUSABLE = (OSError, EOFError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Finished pairs on this machine, and how to read them."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    """How often each pair is read, relative to the others; None: in proportion to its length."""
    held_out: tuple[str, ...] = ()
    """Pairs of validation text; () if it is a part of the others."""
    tokenizer: Any
    seq_length: int
    """Tokens in a sample."""
    split: str
    """Weights of train, valid and test, as in '98,1,1'."""
    seed: int
    cache: str
    """Folder of the sample indices of these pairs alone; those of earlier pairs stay beside it until they are deleted."""
    prepared: tuple[Prepared, ...] = ()
    """What was prepared; excludes prefixes given by the user."""

    def dataset(self, split: str, samples: int) -> Any:
        """The GPTDataset of `split` with at least `samples` samples, a BlendedDataset for several pairs; repeats the text if there is less.

        Call it on every rank; the blend of megatron-core 0.16.1 asks for its rank without checking that there is a process group.
        """
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset

        place = SPLITS.index(split)
        own = split == "train" or not self.held_out
        prefixes, weights = (self.prefixes, self.weights) if own else (self.held_out, None)
        config, sizes = self._config(prefixes, weights, split), [0, 0, 0]
        config.split_matrix = [matrix if at == place else None for at, matrix in enumerate(config.split_matrix)]
        sizes[place] = samples
        for index in map(pair_index, prefixes):  # without a single token the library would loop forever
            if not index.holds_tokens(config.split_matrix[place]):
                raise DataError(nothing_left(self.split, split, index.prefix, index.sequences))
        with _alone(Path(config.path_to_cache)):
            try:
                return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[place]
            except Exception as error:
                # the library wraps errors of writing; a run killed while writing leaves a partial file, which the library takes for a complete one
                cause = error if isinstance(error, _UNUSABLE) else error.__cause__
                if not isinstance(cause, _UNUSABLE):
                    raise
                text = f"the sample index under {config.path_to_cache} cannot be used ({cause}); make room there, delete that folder, "
                raise DataError(text + "or name another with data.cache_dir=...") from error

    def _config(self, prefixes: tuple[str, ...], weights: tuple[float, ...] | None, split: str) -> Any:
        from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

        # without weights the library builds one epoch of a blend, regardless of the requested number
        relative = None if len(prefixes) == 1 else list(weights or map(_tokens, prefixes))
        # with separate validation text, each text is used whole
        whole = ",".join("100" if name == split else "0" for name in SPLITS)
        return GPTDatasetConfig(
            random_seed=self.seed,
            sequence_length=self.seq_length,
            blend=(list(prefixes), relative),
            split=whole if self.held_out else self.split,
            tokenizer=self.tokenizer,
            path_to_cache=self.cache,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )


def _index_digest(prefixes: Iterable[str]) -> str:
    """A digest of the pairs' .idx files: with the settings, all that a sample index is computed from. Raises DataError for a damaged one."""
    found = hashlib.sha256()
    for prefix in prefixes:
        lengths_of(prefix)
        with regular(f"{prefix}.idx") as file:
            while part := file.read(1 << 20):
                found.update(part)
    return found.hexdigest()[:24]


def _tokens(prefix: str) -> float:
    """Number of tokens of a pair. Raises DataError."""
    return float(lengths_of(prefix).sum())


def open_corpus(
    data: Mapping[str, Any],
    *,
    seq_length: int,
    seed: int,
    vocab_size: int | None = None,
    code: bool = True,
    told: ProgressCallback = lambda done, total: None,
) -> Corpus:
    """The corpus that a run's data section names. Collective: rank 0 prepares it while the other ranks wait.

    vocab_size: the model's; a tokenizer with a larger one is refused. code: whether the tokenizer may be a function. Raises BadValue for a split that
    is none, DataError, on every rank if rank 0 failed.
    """
    tok = tokenizer(str(data.get("tokenizer") or "byte"), data.get("end_of_text"), code=code)
    if vocab_size is not None and tok.vocab_size > vocab_size:
        raise DataError(too_small(vocab_size, tok.vocab_size))
    split = data.get("split") or "98,1,1"
    split_shares(split)  # raises BadValue
    ready = on_first_rank(lambda: _ready(data, told))
    return Corpus(
        tokenizer=tok,
        seq_length=seq_length,
        split=split if isinstance(split, str) else ",".join(map(str, split)),
        seed=seed,
        **ready,
    )


def _ready(data: Mapping[str, Any], told: ProgressCallback) -> dict[str, Any]:
    """Pairs of the corpus and of the validation text, prepared; each entry of a weighted blend separately."""
    corpus, weights, held_out = data.get("corpus") or "stdlib", data.get("weights"), data.get("valid")
    entries = [corpus] if isinstance(corpus, str) else list(corpus)
    if weights is not None and (len(weights) != len(entries) or not all(weight > 0 for weight in weights)):
        raise DataError(
            f"data.weights={weights}: expected a number above 0 for each of the {len(entries)} entries of data.corpus"
        )
    prefixes: list[str] = []
    shares: list[float] = []
    done: list[Prepared] = []
    for group, weight in [(corpus, None)] if weights is None else zip(entries, weights, strict=True):
        pairs, prepared = _prepared(group, data, told)
        prefixes, done = [*prefixes, *pairs], [*done, *prepared]
        if weight is not None:
            lengths = [_tokens(prefix) for prefix in pairs]
            shares += [weight * length / sum(lengths) for length in lengths]
    valid, prepared = _prepared(held_out, data, told) if held_out else ((), ())
    found = {"prefixes": tuple(prefixes), "weights": tuple(shares) or None, "held_out": valid}
    # the library's own key has the path and no content: other text packed to the same prefix would be read by the old text's index
    cache = cache_folder(data.get("cache_dir")) / "indices" / _index_digest((*prefixes, *valid))
    return found | {"prepared": (*done, *prepared), "cache": str(cache)}


def _prepared(
    corpus: Any, data: Mapping[str, Any], told: ProgressCallback
) -> tuple[tuple[str, ...], tuple[Prepared, ...]]:
    sources = find(corpus)
    if sources.prefixes:
        return sources.prefixes, ()
    done = prepare(
        sources.files,
        cache=cache_folder(data.get("cache_dir")),
        tokenizer_name=str(data.get("tokenizer") or "byte"),
        end=data.get("end_of_text"),
        keys=(data.get("json_key") or "text",),
        told=told,
    )
    return done.prefixes, (done,)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Rank 0 of one job at a time: the library writes its indices in place, and two jobs on the same text would read each other's partial files."""
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() != 0:
        yield
        return
    try:
        held = lock(folder / ".lock", wait=True)
    except OSError as error:
        raise DataError(
            f"cannot write the data cache {folder} ({error.strerror}); name another folder with data.cache_dir=..."
        ) from error
    with held:
        yield
