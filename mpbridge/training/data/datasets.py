"""megatron-core's GPTDataset over a corpus, one split at a time; rank 0 prepares, the others wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpbridge.backend.devices.collectives import on_first_rank
from mpbridge.common.errors import BadValue, DataError
from mpbridge.common.files import ProgressCallback, lock
from mpbridge.settings.training import SPLITS, split_shares
from mpbridge.training.data.look import nothing_left, too_small
from mpbridge.training.data.pairs import pair_index
from mpbridge.training.data.prepare import Prepared, cache_folder, prepare
from mpbridge.training.data.sources import find
from mpbridge.training.data.tokenizer import tokenizer

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
    prepared: tuple[Prepared, ...] = ()
    """What was prepared; excludes prefixes given by the user."""

    def dataset(self, split: str, samples: int) -> Any:
        """The GPTDataset of `split` with at least `samples` samples, a BlendedDataset for several pairs; repeats the text if there is less.

        Call it on every rank.
        """
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset

        place = SPLITS.index(split)
        prefixes, weights = self._pairs(split)
        config, sizes = self._config(prefixes, weights, split), [0, 0, 0]
        config.split_matrix = [matrix if at == place else None for at, matrix in enumerate(config.split_matrix)]
        sizes[place] = samples
        self._some_text(prefixes, split, config.split_matrix[place])
        with _some_group(len(prefixes) > 1), _alone(Path(config.path_to_cache)):
            try:
                return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[place]
            except Exception as error:
                # the library wraps errors of writing; a run killed while writing leaves a partial file, which the library takes for a complete one
                cause = error if isinstance(error, _UNUSABLE) else error.__cause__
                if not isinstance(cause, _UNUSABLE):
                    raise
                text = f"the sample index under {config.path_to_cache} cannot be used ({cause}); make room there, delete that folder, "
                raise DataError(text + "or name another with data.cache_dir=...") from error

    def _pairs(self, split: str) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
        if split != "train" and self.held_out:
            return self.held_out, None
        return self.prefixes, self.weights

    def _config(self, prefixes: tuple[str, ...], weights: tuple[float, ...] | None, split: str) -> Any:
        from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

        # without weights the library builds one epoch of a blend, regardless of the requested number
        relative = None if len(prefixes) == 1 else list(weights or (float(_lengths(p).sum()) for p in prefixes))
        # with separate validation text, each text is used whole
        whole = ",".join("100" if name == split else "0" for name in SPLITS)
        return GPTDatasetConfig(
            random_seed=self.seed,
            sequence_length=self.seq_length,
            blend=(list(prefixes), relative),
            split=whole if self.held_out else self.split,
            tokenizer=self.tokenizer,
            path_to_cache=f"{self.cache}/indices",
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )

    def _some_text(self, prefixes: tuple[str, ...], split: str, span: tuple[float, float] | None) -> None:
        """Raises DataError for a split without a single token, on which the library would loop forever."""
        for prefix in prefixes:
            lengths = _lengths(prefix)
            start, end = (round(edge * len(lengths)) for edge in span or (0.0, 0.0))
            if not lengths[start:end].sum():
                raise DataError(nothing_left(self.split, split, prefix, len(lengths)))


def _lengths(prefix: str) -> Any:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    pair_index(prefix)  # the library maps any file without checking it
    try:
        index = IndexedDataset(prefix, multimodal=False)
        # a copy: the library unmaps the file when the dataset is freed, which would leave its array dangling
        return np.array(index.sequence_lengths)
    except Exception as error:
        raise DataError(f"{prefix}.bin/.idx cannot be read: {type(error).__name__}: {error}") from error


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

    vocab_size: the model's; a tokenizer with a larger one is refused. code: whether the tokenizer may be a function. Raises DataError, on every rank if
    rank 0 failed.
    """
    tok = tokenizer(str(data.get("tokenizer") or "byte"), data.get("end_of_text"), code=code)
    if vocab_size is not None and tok.vocab_size > vocab_size:
        raise DataError(too_small(vocab_size, tok.vocab_size))
    ready = on_first_rank(lambda: _ready(data, told))
    return Corpus(
        tokenizer=tok,
        seq_length=seq_length,
        split=_split(data.get("split") or "98,1,1"),
        seed=seed,
        cache=str(cache_folder(data.get("cache_dir"))),
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
            lengths = [float(_lengths(prefix).sum()) for prefix in pairs]
            shares += [weight * length / sum(lengths) for length in lengths]
    valid, prepared = _prepared(held_out, data, told) if held_out else ((), ())
    return {
        "prefixes": tuple(prefixes),
        "weights": tuple(shares) or None,
        "held_out": valid,
        "prepared": (*done, *prepared),
    }


def _prepared(
    corpus: Any, data: Mapping[str, Any], told: ProgressCallback
) -> tuple[tuple[str, ...], tuple[Prepared, ...]]:
    sources = find(corpus)
    if sources.prefixes:
        return sources.prefixes, ()
    key = data.get("json_key") or "text"
    keys = (key,) if isinstance(key, str) else tuple(key)
    done = prepare(
        sources.files,
        cache=cache_folder(data.get("cache_dir")),
        tokenizer_name=str(data.get("tokenizer") or "byte"),
        end=data.get("end_of_text"),
        keys=keys,
        told=told,
    )
    return done.prefixes, (done,)


def _split(given: str | Sequence[float]) -> str:
    try:
        split_shares(given)
    except BadValue as error:
        raise DataError(str(error)) from None
    return given if isinstance(given, str) else ",".join(map(str, given))


@contextmanager
def _some_group(needed: bool) -> Iterator[None]:
    """A process group of one if there is none: BlendedDataset of megatron-core 0.16.1 asks for its rank without checking."""
    from mpbridge.backend.engines.parallel import start_process_group, stop_process_group

    made = needed and start_process_group(False)
    try:
        yield
    finally:
        if made:
            stop_process_group()


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
