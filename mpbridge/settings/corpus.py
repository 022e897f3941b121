"""The parts of the data section that need no files: the shares of a split, the weights of a blend."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpbridge.common.errors import BadValue, brief
from mpbridge.settings.huggingface.tokenizers import BYTE

SPLITS = ("train", "valid", "test")
"""Parts of a corpus, in the order of data.split."""


def split_shares(given: str | Sequence[float]) -> tuple[tuple[float, float] | None, ...]:
    """Start and end of each part of `SPLITS` as fractions of the sequences; None: an empty part. Raises BadValue.

    The way megatron-core splits a corpus (datasets/blended_megatron_dataset_config.py): weights are normalised and laid end to end.
    """
    parts = given.split(",") if isinstance(given, str) else given
    try:
        weights = [float(part) for part in parts]
    except (TypeError, ValueError):
        weights = []
    sound = weights and all(math.isfinite(weight) and weight >= 0 for weight in weights)
    if not sound or len(weights) > len(SPLITS) or sum(weights) <= 0:
        raise BadValue(f"data.split={brief(given)}: expected up to three weights, as in '98,1,1'")
    shares, start = [], 0.0
    for weight in [*weights, 0.0, 0.0][: len(SPLITS)]:
        end = start + weight / sum(weights)
        shares.append((start, end) if weight else None)
        start = end
    return tuple(shares)


def entries_of(corpus: str | Sequence[str]) -> list[str]:
    """data.corpus or data.valid as a list."""
    return [corpus] if isinstance(corpus, str) else [str(entry) for entry in corpus]


def data_faults(data: Mapping[str, Any]) -> Iterator[str]:
    """Every fault in a data section with its defaults filled in that does not depend on the files."""
    try:
        if split_shares(data["split"])[0] is None:
            yield f"data.split={brief(data['split'])} leaves nothing to train on: give the first part a weight"
    except BadValue as error:
        yield str(error)
    if not data["corpus"]:
        yield f"data.corpus={brief(data['corpus'])}: expected 'stdlib', or at least one file, folder, glob, data set or prefix"
    count, weights = len(entries_of(data["corpus"] or "stdlib")), data["weights"]
    if weights is not None and (len(weights) != count or not all(math.isfinite(one) and one > 0 for one in weights)):
        yield f"data.weights={brief(weights)}: expected a number above 0 for each entry of data.corpus, which has {count}"
    if data["tokenizer"] == BYTE and data["end_of_text"] is not None:
        yield f"data.end_of_text={brief(data['end_of_text'])}: data.tokenizer=byte always ends a text with 256: drop it"
