"""What a run would find with its data section, without packing anything: the texts of files, record by record (an unusable record yields a reason instead of an exception);
the header of a finished .bin/.idx pair, so that damage is reported before a library maps the file; files, packages, a first usable text. Loads no framework."""

from __future__ import annotations

import json
import os
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mpbridge.common.errors import BadValue, DataError, MpbridgeError
from mpbridge.settings.huggingface.tokenizers import BYTE, BYTE_VOCABULARY, LIBRARY, is_factory, tokenizer_files
from mpbridge.settings.training import SPLITS, entries_of, split_shares
from mpbridge.training.data.sources import EXTRA, READ, Sources, is_json_lines, located

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Alone, one is legal in JSON but not in UTF-8."""


@dataclass(frozen=True, slots=True)
class Text:
    """One document of the output `key`."""

    key: str
    text: str
    read: int = 0
    """Bytes of the file up to its end."""


@dataclass(frozen=True, slots=True)
class Skip:
    """A record, or an element of one, that was skipped, and why."""

    key: str
    reason: str
    read: int = 0


def records(path: Path, keys: Sequence[str]) -> Iterator[Text | Skip]:
    """Every usable text of the file and every reason to skip. A text file is one record, under the first key. Raises DataError for a JSON array."""
    if not is_json_lines(path):
        content = path.read_bytes()
        yield from _usable(keys[0], content, len(content))
        return
    _refuse_array(path)
    read = 0
    with path.open("rb") as file:
        for line in file:
            read += len(line)
            try:
                row = json.loads(line)
            except UnicodeDecodeError:
                yield from (Skip(key, "not UTF-8", read) for key in keys)
            except (ValueError, RecursionError):
                reason = "not JSON" if line.strip() else "blank line"
                yield from (Skip(key, reason, read) for key in keys)
            else:
                for key in keys:
                    yield from _values(key, row, read)


def _refuse_array(path: Path) -> None:
    """Raises DataError for one JSON array over many lines, or of objects: read by lines, its records would be lost."""
    try:
        with path.open("rb") as file:
            begin = file.read(4096)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if re.match(rb"(\xef\xbb\xbf)?\s*\[(\s*\{|[ \t\r]*\n)", begin):
        raise DataError(
            f"{path} is one JSON array, expected JSON lines with one record per line: jq -c '.[]' {path} > {path.stem}.jsonl"
        )


def _values(key: str, row: Any, read: int) -> Iterator[Text | Skip]:
    if isinstance(row, dict):
        if key not in row:
            yield Skip(key, "key missing", read)
            return
        row = row[key]
    # a list holds several documents of one record
    for value in row if isinstance(row, list) else [row]:
        yield from _usable(key, value, read)


def _usable(key: str, value: Any, read: int) -> Iterator[Text | Skip]:
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8-sig")
        except UnicodeDecodeError:
            yield Skip(key, "not UTF-8", read)
            return
    if value is None:
        yield Skip(key, "null", read)
    elif not isinstance(value, str):
        yield Skip(key, "not text", read)
    elif not value.strip():
        yield Skip(key, "empty", read)
    elif not value.isascii() and _SURROGATE.search(value):
        yield Skip(key, "not UTF-8", read)
    else:
        yield Text(key, value, read)


_MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
"""Code of a dtype in the index -> bytes of a token. Source of the format: megatron/core/datasets/indexed_dataset.py, version 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairIndex:
    """The header of a pair's .idx."""

    prefix: str
    sequences: int
    width: int
    """Bytes of a token."""

    def holds_tokens(self, share: tuple[float, float] | None) -> bool:
        """Whether the sequences of that share of the pair (None: no share) have any token."""
        start, stop = (4 * round(edge * self.sequences) for edge in share or (0.0, 0.0))
        step = 1 << 22
        with open(f"{self.prefix}.idx", "rb") as stream:
            stream.seek(HEADER.size + start)  # of their lengths, four bytes each
            return any(any(stream.read(min(step, stop - at))) for at in range(start, stop, step))


def pair_index(prefix: str) -> PairIndex:
    """The header of `prefix`.idx. Raises DataError if it is not an index, is truncated, or is not that of the .bin."""
    place = Path(f"{prefix}.idx")
    try:
        size, data = place.stat().st_size, Path(f"{prefix}.bin").stat().st_size
        with place.open("rb") as stream:
            front = stream.read(HEADER.size)
    except OSError as error:
        raise DataError(f"{error.filename or place} cannot be read: {error.strerror}") from None
    magic, version, code, sequences, documents = HEADER.unpack(front.ljust(HEADER.size, b"\0"))
    if magic != _MAGIC or version != 1 or code not in _BYTES:
        raise DataError(
            f"{place} is not an index of megatron-core's .bin/.idx format (version 1): preprocess the text again"
        )
    needed = HEADER.size + 12 * sequences + 8 * documents
    if size < needed:
        raise DataError(
            f"{place} has {size:,} bytes, its header requires {needed:,}: it is truncated; pack the text again"
        )
    with place.open("rb") as stream:

        def number(end: int, size: int) -> int:
            stream.seek(end - size)
            return int.from_bytes(stream.read(size), "little", signed=True)

        length, pointer = number(HEADER.size + 4 * sequences, 4), number(HEADER.size + 12 * sequences, 8)
        end = number(needed, 8)
    if documents < 1 or end != sequences:
        raise DataError(
            f"{place} is damaged: its last document ends behind sequence {end:,}, and it has {sequences:,}; pack the text again"
        )
    if data != (wanted := pointer + length * _BYTES[code] if sequences else 0):
        raise DataError(
            f"{prefix}.bin has {data:,} bytes, its index requires {wanted:,}: one of them is truncated or of another text; pack the text again"
        )
    return PairIndex(prefix=prefix, sequences=sequences, width=_BYTES[code])


def lengths_of(prefix: str) -> Any:
    """The tokens in each sequence of a pair (an array), after all of its .idx was compared with the .bin. Raises DataError."""
    import numpy as np

    index, place, end = pair_index(prefix), f"{prefix}.idx", Path(f"{prefix}.bin").stat().st_size
    lengths = np.fromfile(place, dtype="<i4", count=index.sequences, offset=HEADER.size)
    starts = np.fromfile(place, dtype="<i8", count=index.sequences, offset=HEADER.size + lengths.nbytes)
    wrong = np.flatnonzero(np.diff(starts, append=end) != lengths * np.int64(index.width))
    if len(wrong):
        raise DataError(
            f"{place} is damaged: sequence {wrong[0]:,} does not end where the next begins; pack the text again"
        )
    return lengths


MOST_RECORDS, MOST_BYTES = 10_000, 1 << 24
"""Maximum records and bytes searched for a usable text; a corpus without one among them is still packed, and judged as a whole."""


def tokenizer_faults(data: Mapping[str, Any], rows: int) -> tuple[list[str], list[str]]:
    """(faults on any machine, what this machine lacks) for the tokenizer. rows: rows of the model's embedding."""
    name = data["tokenizer"]
    if name == BYTE or is_factory(name):
        # code is not run just to learn its vocabulary size
        small = name == BYTE and rows < BYTE_VOCABULARY
        return ([too_small(rows, BYTE_VOCABULARY)] if small else []), []
    try:
        files = tokenizer_files(name, data["end_of_text"])
    except MpbridgeError as error:
        return [], [str(error)]
    wrong = [too_small(rows, files.size)] if rows < files.size else []
    if files.end is None:
        wrong.append(files.without_end())
    lacking = find_spec(LIBRARY) is None
    return wrong, [f"data.tokenizer={name!r} needs the package {LIBRARY}: {EXTRA}"] if lacking else []


def too_small(rows: int, size: int) -> str:
    """The message for an embedding with fewer rows than the tokenizer has tokens."""
    return f"model.vocab_size={rows} is too small: the tokenizer has {size} tokens (drop the setting: it then follows from the tokenizer)"


def corpus_faults(data: Mapping[str, Any], *, evaluates: bool) -> list[str]:
    """Why the corpus, or the validation text, cannot be read here. evaluates: whether the run also reads a held-out part."""
    valid = data["valid"] if evaluates else None
    wanted = [("data.corpus", data["corpus"] or "stdlib", "train" if valid or not evaluates else "train valid")]
    wanted += [("data.valid", valid, "")] if valid else []
    faults: list[str] = []
    for setting, given, parts in wanted:
        entries = entries_of(given)
        # each entry of a weighted blend is looked for separately
        groups = [[entry] for entry in entries] if data["weights"] and setting == "data.corpus" else [entries]
        for group in groups:
            found = _faults_of(group, data, parts.split())
            faults += [f"{setting}={' '.join(group)}: {fault}" if len(group) == 1 else f"{setting}: {fault}" for fault in found]  # fmt: skip
    return faults


def _faults_of(entries: Sequence[str], data: Mapping[str, Any], parts: Sequence[str]) -> list[str]:
    if list(entries) == ["stdlib"]:
        return []
    sources, faults = located(entries)
    if faults:
        return faults
    try:
        return _pairs(sources, data, parts) if sources.prefixes else _texts(sources.files, data)
    except DataError as error:
        return [str(error)]


def _pairs(sources: Sources, data: Mapping[str, Any], parts: Iterable[str]) -> list[str]:
    indices = [pair_index(prefix) for prefix in sources.prefixes]
    try:
        shares = split_shares(data["split"])
    except BadValue:
        return []  # reported as a fault of the setting
    places = [(part, shares[SPLITS.index(part)]) for part in parts if not data["valid"]] or [("it", (0.0, 1.0))]
    return [
        nothing_left(data["split"], part, index.prefix, index.sequences)
        for index in indices
        for part, share in places
        if not index.holds_tokens(share)
    ]


def nothing_left(split: str, part: str, prefix: str, sequences: int) -> str:
    """The message for a part of the split without a single token."""
    return f"data.split={split!r} leaves nothing for {part!r}: {prefix} contains {sequences} sequences; provide more text, or give that part more weight"


def _texts(files: Sequence[Path], data: Mapping[str, Any]) -> list[str]:
    closed = [path for path in files if not os.access(path, os.R_OK)]
    if closed:
        return [f"{closed[0]} cannot be read: no permission"]
    keys, skipped = [data["json_key"] or "text"], Counter[str]()
    for path in files:
        if path.stat().st_size > MOST_BYTES and not is_json_lines(path):
            return []  # a text of that length
        for found in records(path, keys):
            if not isinstance(found, Skip) or found.read > MOST_BYTES or skipped.total() > MOST_RECORDS:
                return []  # usable, or enough was searched
            skipped[found.reason] += 1
    return [no_text(skipped, keys)]


def no_text(skipped: Mapping[str, int], keys: Sequence[str]) -> str:
    """The message for a corpus without a usable record."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items())) or "no records at all"
    return f"the corpus contains no usable text ({reasons}); expected {', '.join(READ)} with text under the key(s) {list(keys)}"
