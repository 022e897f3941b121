"""megatron-core's GPTDataset over a corpus, one split at a time; rank 0 prepares, the others wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpbridge.data.prepare import Prepared, cache_folder, prepare
from mpbridge.data.sources import find
from mpbridge.data.tokenizer import tokenizer
from mpbridge.devices.together import on_first_rank
from mpbridge.errors import DataError
from mpbridge.locks import lock

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Pairs that are ready on this machine, and how to read them."""

    prefixes: tuple[str, ...]
    tokenizer: Any
    seq_length: int
    """Tokens in a sample."""
    split: str
    """Weights of train, valid and test, as in '98,1,1'."""
    seed: int
    cache: str
    prepared: Prepared | None
    """None for prefixes that the user gave."""

    def dataset(self, split: str, samples: int) -> Any:
        """The GPTDataset of `split` with at least `samples` samples; it repeats the text where there is less. Call it on every rank."""
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset

        place = SPLITS.index(split)
        config, sizes = self._config(), [0, 0, 0]
        config.split_matrix = [matrix if at == place else None for at, matrix in enumerate(config.split_matrix)]
        sizes[place] = samples
        self._some_text(split, config.split_matrix[place])
        with _some_group(len(self.prefixes) > 1), _alone(Path(config.path_to_cache)):
            try:
                return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[place]
            except (OSError, EOFError, ValueError) as error:
                # a run that was killed while it wrote leaves half a file, which the library takes for a complete one
                raise DataError(
                    f"the sample index under {config.path_to_cache} cannot be used ({error}); delete that folder"
                ) from error

    def _config(self) -> Any:
        from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

        # without weights the library builds one epoch of a blend, whatever was asked for
        weights = None if len(self.prefixes) == 1 else [float(_lengths(prefix).sum()) for prefix in self.prefixes]
        return GPTDatasetConfig(
            random_seed=self.seed,
            sequence_length=self.seq_length,
            blend=(list(self.prefixes), weights),
            split=self.split,
            tokenizer=self.tokenizer,
            path_to_cache=f"{self.cache}/indices",
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )

    def _some_text(self, split: str, span: tuple[float, float] | None) -> None:
        """A split without a single token would put the library into an endless loop."""
        for prefix in self.prefixes:
            lengths = _lengths(prefix)
            start, end = (round(edge * len(lengths)) for edge in span or (0.0, 0.0))
            if not lengths[start:end].sum():
                raise DataError(
                    f"data.split={self.split!r} leaves nothing for {split!r}: {prefix} holds {len(lengths)} sequences; "
                    "give more text, or that part more weight"
                )


def _lengths(prefix: str) -> Any:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    try:
        index = IndexedDataset(prefix, multimodal=False)
        # a copy: the library unmaps the file when the dataset goes, and its array would dangle
        return np.array(index.sequence_lengths)
    except Exception as error:
        raise DataError(f"{prefix}.bin/.idx cannot be read: {type(error).__name__}: {error}") from error


def open_corpus(data: Mapping[str, Any], *, seq_length: int, seed: int, vocab_size: int | None = None) -> Corpus:
    """The corpus that a run's data section names. Collective: rank 0 prepares it while the other ranks wait.

    vocab_size: of the model; a tokenizer with a larger one is refused. Raises DataError, on every rank where rank 0 failed.
    """
    tok = tokenizer(str(data.get("tokenizer") or "byte"))
    if vocab_size is not None and tok.vocab_size > vocab_size:
        raise DataError(f"model.vocab_size={vocab_size} is too small: the tokenizer has {tok.vocab_size} tokens")
    prefixes, prepared = on_first_rank(lambda: _prepared(data))
    return Corpus(
        prefixes=prefixes,
        tokenizer=tok,
        seq_length=seq_length,
        split=_split(data.get("split") or "98,1,1"),
        seed=seed,
        cache=str(cache_folder(data.get("cache_dir"))),
        prepared=prepared,
    )


def _prepared(data: Mapping[str, Any]) -> tuple[tuple[str, ...], Prepared | None]:
    sources = find(data.get("corpus") or "stdlib")
    if sources.prefixes:
        return sources.prefixes, None
    key = data.get("json_key") or "text"
    keys = (key,) if isinstance(key, str) else tuple(key)
    name = str(data.get("tokenizer") or "byte")
    done = prepare(
        sources.files,
        cache=cache_folder(data.get("cache_dir")),
        tokenizer_name=name,
        keys=keys,
        workers=data.get("workers"),
    )
    return done.prefixes, done


def _split(given: str | Sequence[float]) -> str:
    text = given if isinstance(given, str) else ",".join(str(weight) for weight in given)
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= len(SPLITS) or min(weights) < 0 or sum(weights) <= 0:
        raise DataError(f"data.split={given!r}: expected up to three weights, as in '98,1,1'")
    return text


@contextmanager
def _some_group(needed: bool) -> Iterator[None]:
    """A process group of one where there is none: BlendedDataset of megatron-core 0.16.1 asks for its rank without checking."""
    from mpbridge.engines.parallel import start_process_group, stop_process_group

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
