"""A finished .bin/.idx pair: its header, read without a framework, so that damage is reported before a library maps the file, and the figures of its contents."""

from __future__ import annotations

import array
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpbridge.common.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
"""Code of a dtype in the index -> bytes of a token. Source of the format: megatron/core/datasets/indexed_dataset.py, version 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairIndex:
    """The header of a pair's .idx."""

    prefix: str
    sequences: int
    documents: int
    """One more than the number of documents: the end of the last one is included."""

    def lengths(self, start: int, stop: int) -> array.array[int]:
        """Lengths, in tokens, of the sequences `start` to `stop`."""
        found = array.array("i")
        with open(f"{self.prefix}.idx", "rb") as stream:
            stream.seek(_HEADER.size + 4 * start)
            found.frombytes(stream.read(4 * max(0, stop - start)))
        if sys.byteorder == "big":
            found.byteswap()
        return found

    def holds_tokens(self, share: tuple[float, float] | None) -> bool:
        """Whether the sequences of that share of the pair (None: no share) have any token."""
        start, stop = (round(edge * self.sequences) for edge in share or (0.0, 0.0))
        step = 1 << 20
        return any(any(self.lengths(at, min(at + step, stop))) for at in range(start, stop, step))


def pair_index(prefix: str) -> PairIndex:
    """The header of `prefix`.idx. Raises DataError if it is not an index or is truncated."""
    place = Path(f"{prefix}.idx")
    try:
        size, data = place.stat().st_size, Path(f"{prefix}.bin").stat().st_size
        with place.open("rb") as stream:
            front = stream.read(_HEADER.size)
    except OSError as error:
        raise DataError(f"{error.filename or place} cannot be read: {error.strerror}") from None
    magic, version, code, sequences, documents = _HEADER.unpack(front.ljust(_HEADER.size, b"\0"))
    if magic != _MAGIC or version != 1 or code not in _BYTES:
        raise DataError(
            f"{place} is not an index of megatron-core's .bin/.idx format (version 1): preprocess the text again"
        )
    needed = _HEADER.size + 12 * sequences + 8 * documents
    if size < needed:
        raise DataError(
            f"{place} has {size:,} bytes, its header requires {needed:,}: it is truncated; pack the text again"
        )
    if data % _BYTES[code]:
        raise DataError(
            f"{prefix}.bin has {data:,} bytes, not a multiple of the {_BYTES[code]} of a token: it is truncated; pack the text again"
        )
    return PairIndex(prefix=prefix, sequences=sequences, documents=documents)


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
    import numpy as np
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
