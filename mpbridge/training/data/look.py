"""Checks what a run would find with its data section, without packing anything: files, packages, a first usable text. Loads no framework."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mpbridge.common.errors import BadValue, DataError, MpbridgeError
from mpbridge.settings.huggingface.tokenizers import BYTE, LIBRARY, is_factory, tokenizer_files
from mpbridge.settings.training import SPLITS, entries_of, split_shares
from mpbridge.training.data.sources import EXTRA, JSON_LINES, READ, Sources, located

MOST_RECORDS, MOST_BYTES = 10_000, 1 << 24
"""Maximum records and bytes searched for a usable text; a corpus without one among them is still packed, and judged as a whole."""


def tokenizer_faults(data: Mapping[str, Any], rows: int) -> tuple[list[str], list[str]]:
    """(faults on any machine, what this machine lacks) for the tokenizer. rows: rows of the model's embedding."""
    name = data["tokenizer"]
    if name == BYTE or is_factory(name):
        # code is not run just to learn its vocabulary size
        return ([too_small(rows, 259)] if name == BYTE and rows < 259 else []), []
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
    from mpbridge.training.data.pairs import pair_index

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
    skipped = _first_text(files, [data["json_key"] or "text"])
    return [] if skipped is None else [no_text(skipped, [data["json_key"] or "text"])]


def _first_text(files: Sequence[Path], keys: Sequence[str]) -> Counter[str] | None:
    """None if a usable text was found or enough was searched; otherwise why there is none."""
    from mpbridge.training.data.records import Skip, records

    skipped: Counter[str] = Counter()
    for path in files:
        if path.stat().st_size > MOST_BYTES and path.suffix not in JSON_LINES:
            return None  # a text of that length
        for found in records(path, keys):
            if not isinstance(found, Skip) or found.read > MOST_BYTES or skipped.total() > MOST_RECORDS:
                return None
            skipped[found.reason] += 1
    return skipped


def no_text(skipped: Mapping[str, int], keys: Sequence[str]) -> str:
    """The message for a corpus without a usable record."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items())) or "no records at all"
    return f"the corpus contains no usable text ({reasons}); expected {', '.join(READ)} with text under the key(s) {list(keys)}"
