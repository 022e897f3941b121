"""Bounds what each rank sends to all others: in a large world it sends fewer samples, so that no rank receives more than a few megabytes."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Collection, Mapping
from typing import Any

from mpbridge.observe.audit.observe import Observed

BUDGET = 4_000_000
"""Bytes that a rank may receive of data that differs between ranks: sampled gradients and amaxes. Equal data is sent once (devices.gather)."""
_WEIGHT = 1000
"""Bytes of one weight's samples, produced and read (audit.values.SAMPLES of each)."""


def bounded(seen: Observed, ranks: int) -> Observed:
    """`seen`, limited to as many followed weights as fit the budget: all of them up to some tens of ranks, one from 4,000 ranks on.

    Every rank chooses the same names among those it has: the ones with the smallest checksum.
    """
    most = max(1, BUDGET // (ranks * _WEIGHT))
    followed, quantized = seen.followed, seen.quantized
    if followed is not None and len(followed.produced) > most:
        names = chosen(followed.produced, most)
        thin = max(1, -(-ranks * _WEIGHT // BUDGET))
        # positions index the whole tensor, so every rank keeps the same ones, whichever shard it has
        kept = {name: sorted(followed.produced[name])[::thin] for name in names}
        followed = dataclasses.replace(
            followed, produced=_part(followed.produced, kept), read=_part(followed.read, kept)
        )
    if quantized is not None and len(quantized.amaxes) > 2 * most:
        names = chosen(quantized.amaxes, 2 * most)
        quantized = dataclasses.replace(quantized, amaxes={name: quantized.amaxes[name] for name in names})
    return dataclasses.replace(seen, followed=followed, quantized=quantized)


def chosen(names: Collection[str], most: int) -> list[str]:
    """At most `most` of the names; the same choice on every rank that has them."""
    return sorted(names, key=lambda name: (zlib.crc32(name.encode()), name))[:most]


def _part(values: Mapping[str, dict[int, Any]], kept: Mapping[str, Collection[int]]) -> dict[str, dict[int, Any]]:
    """The values of those names at those positions."""
    return {
        name: {where: values[name][where] for where in wanted if where in values[name]}
        for name, wanted in kept.items()
        if name in values
    }
