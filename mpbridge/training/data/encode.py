"""Encodes units of work into .bin/.idx pairs: the part of preprocessing that runs in workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpbridge.common.errors import DataError
from mpbridge.training.data.records import RecordRange, Skip, records

LONGEST = 64 << 20
"""Maximum characters of a document that is tokenized whole: its tokens, and a library's data about each, are in memory at once."""


@dataclass(slots=True)
class RecordCounts:
    """Counts of what happened to the records of some units; can be added."""

    documents: int = 0
    tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Skipped records, by reason."""

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> RecordCounts:
        """From `as_data`'s data."""
        return cls(facts["documents"], facts["tokens"], Counter(facts["skipped"]))

    def as_data(self) -> dict[str, Any]:
        """In JSON types."""
        return {"documents": self.documents, "tokens": self.tokens, "skipped": dict(self.skipped)}

    def __iadd__(self, other: RecordCounts) -> RecordCounts:
        self.documents += other.documents
        self.tokens += other.tokens
        self.skipped += other.skipped
        return self


def pieces(text: str, size: int) -> Iterator[str]:
    """`text` in pieces of about `size` characters, cut after line ends if there are any.

    GPTDataset splits into train and validation by whole sequences: one long file must not be a single one.
    """
    start = 0
    while start < len(text):
        end = start + size
        if end < len(text):
            end = text.rfind("\n", start + size // 2, end) + 1 or end
        yield text[start:end]
        start = end


def cut(tokens: Sequence[int], most: int, line_end: Sequence[int]) -> Iterator[Sequence[int]]:
    """`tokens` in parts of at most `most`, cut after a token of `line_end` if the second half of a part has one.

    A text is tokenized whole and its tokens are cut: SentencePiece's dummy prefix, or a whitespace rule, would produce other tokens where the text is cut.
    """
    start = 0
    while start < len(tokens):
        end = start + most
        if end < len(tokens):
            ends = (place for place in range(end, start + most // 2, -1) if tokens[place - 1] in line_end)
            end = next(ends, end)
        yield tokens[start:end]
        start = end


def _tokens(text: str, tok: Any, piece: int, line_end: Sequence[int] | None) -> list[Sequence[int]]:
    """The tokens of a document, in sequences of about `piece` characters. line_end: None for bytes, which are the same wherever the text is cut."""
    if line_end is None:
        return [tok.tokenize(part) for part in pieces(text, piece)]
    found = tok.tokenize(text)
    most = max(1, -(-len(found) * piece // len(text)))
    return list(cut(found, most, line_end))


def token_dtype(tok: Any) -> Any:
    """The numpy type that can represent every token: uint16 up to 65,536 tokens, else int32 (the library's rule)."""
    from megatron.core.datasets.indexed_dataset import DType

    return DType.optimal_dtype(tok.vocab_size)


def encode(
    work: Sequence[RecordRange], tok: Any, keys: Sequence[str], folder: Path, piece: int, *, whole: bool
) -> RecordCounts:
    """Writes `folder`/<key>.bin and .idx for every key, empty ones too; returns the tally. Any failure is raised.

    whole: a document is tokenized in one go, as required by all tokenizers but bytes; one above `LONGEST` is a DataError.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    dtype = token_dtype(tok)
    writers = {key: IndexedDatasetBuilder(str(folder / f"{key}.bin"), dtype=dtype) for key in keys}
    tally = RecordCounts()
    try:
        line_end = tok.tokenize("\n")[-1:] if whole else None
        for unit in work:
            for found in records(unit, keys):
                if isinstance(found, Skip):
                    tally.skipped[found.reason] += 1
                    continue
                if whole and len(found.text) > LONGEST:
                    raise DataError(
                        f"{unit.path}: a document of {len(found.text):,} characters; a tokenizer reads a document whole, and {LONGEST:,} is the maximum: "
                        "divide it (split -C 32M --additional-suffix=.txt FILE part-), or convert it to JSON lines"
                    )
                parts = _tokens(found.text, tok, piece, line_end)
                if found.text and not any(len(part) for part in parts):
                    tally.skipped["no token for any of it"] += 1
                    continue
                parts = parts or [[]]
                parts[-1] = [*parts[-1], tok.eod]
                tally.documents += 1
                tally.tokens += sum(map(len, parts))
                writers[found.key].add_document(
                    np.concatenate([np.asarray(part, dtype=dtype) for part in parts]), list(map(len, parts))
                )
    finally:
        for key, writer in writers.items():
            writer.finalize(str(folder / f"{key}.idx"))
    return tally


def merge(shards: Sequence[Path], tok: Any, keys: Sequence[str], folder: Path) -> None:
    """The shards' pairs, concatenated into one pair per key in `folder`."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for key in keys:
        writer = IndexedDatasetBuilder(str(folder / f"{key}.bin"), dtype=token_dtype(tok))
        for shard in shards:
            writer.add_index(str(shard / key))
        writer.finalize(str(folder / f"{key}.idx"))
