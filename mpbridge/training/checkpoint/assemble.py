"""Merges the ranks' parts of an index, on rank 0, as the last step before a checkpoint is sealed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpbridge.backend.devices.gather import from_all
from mpbridge.backend.devices.together import agreed
from mpbridge.common.errors import CheckpointError
from mpbridge.common.files import read_json
from mpbridge.training.checkpoint import foreign
from mpbridge.training.checkpoint.index import INDEX, Index, StoredPiece, StoredTensor
from mpbridge.training.checkpoint.writer import part_file


def indexed(partial: Path, ranks: int) -> dict[str, Any]:
    """Merges the ranks' parts into one index (and one for other tools); returns size and checksum of each data file. Raises CheckpointError."""
    parts = [read_json(partial / part_file(rank)) for rank in range(ranks)]
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, tuple[str, int, int]] = {}
    for part in parts:
        file = part["file"]
        for key, entry in part["tensors"].items():
            pieces = tuple(
                StoredPiece(file, at, tuple(offset), tuple(shape)) for at, offset, shape, *_ in entry["pieces"]
            )
            before = tensors.get(key)
            tensors[key] = StoredTensor(
                entry["dtype"], tuple(entry["shape"]), (*(before.pieces if before else ()), *pieces)
            )
        objects |= {key: (file, at, size) for key, (at, size) in part["objects"].items()}
    index = Index(tensors, objects)
    if faults := index.incomplete():
        raise CheckpointError("the ranks' shards do not make up the whole state: " + "; ".join(faults[:5]))
    (partial / INDEX).write_text(json.dumps(index.as_data(), separators=(",", ":")), encoding="utf-8")
    foreign.write_metadata(partial, parts)
    for rank in range(ranks):
        (partial / part_file(rank)).unlink()
    return {part["file"]: {"bytes": part["bytes"], "sha256": part["sha256"]} for part in parts}


def raise_first(said: str) -> None:
    """Raises CheckpointError on every rank if any of them reports a fault."""
    if agreed(1 if said else 0):
        everywhere = from_all(said)
        rank, text = next((rank, text) for rank, text in enumerate(everywhere) if text)
        raise OSError(text if len(everywhere) == 1 else f"rank {rank}: {text}")
