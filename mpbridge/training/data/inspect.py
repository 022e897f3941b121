"""The contents of a finished .bin/.idx pair."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpbridge.common.errors import DataError
from mpbridge.training.data.pairs import pair_index


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFigures:
    """Figures of one .bin/.idx pair."""

    prefix: str
    documents: int
    sequences: int
    tokens: int
    dtype: str
    bytes: int
    """Size of the .bin."""
    shortest: int
    median: int
    longest: int
    """Tokens in a sequence."""
    largest_token: int
    first: tuple[int, ...]
    """The first tokens."""


SHOWN = 24
"""Number of tokens in `PairFigures.first`."""
_STEP = 1 << 24


def pair(prefix: str) -> PairFigures:
    """The figures of a pair; reads all of it once. Raises DataError."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    pair_index(prefix)  # the library maps any file without checking it, and cannot release one that it could not read
    try:
        index: Any = IndexedDataset(prefix, multimodal=False)
        lengths = np.array(index.sequence_lengths)
        documents, kind = len(index.document_indices) - 1, np.dtype(index.index.dtype)
        file = Path(f"{prefix}.bin")
        tokens = np.memmap(file, dtype=kind, mode="r") if file.stat().st_size else np.empty(0, dtype=kind)
    except Exception as error:
        raise DataError(f"{prefix}.bin/.idx cannot be read: {type(error).__name__}: {error}") from error
    if len(tokens) != lengths.sum():
        raise DataError(
            f"{prefix}.bin contains {len(tokens):,} tokens, its index {lengths.sum():,}: one of them is truncated"
        )
    largest = max((int(tokens[at : at + _STEP].max()) for at in range(0, len(tokens), _STEP)), default=0)
    return PairFigures(
        prefix=prefix,
        documents=documents,
        sequences=len(lengths),
        tokens=len(tokens),
        dtype=kind.name,
        bytes=file.stat().st_size,
        shortest=int(lengths.min()) if len(lengths) else 0,
        median=int(np.median(lengths)) if len(lengths) else 0,
        longest=int(lengths.max(initial=0)),
        largest_token=largest,
        first=tuple(int(token) for token in tokens[:SHOWN]),
    )
