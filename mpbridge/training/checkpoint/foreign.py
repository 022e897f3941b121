"""Files of a checkpoint for other tools: torch's `.metadata`, megatron-core's `metadata.json` and `common.pt`. Written, and never read, by mpbridge.

With them torch.distributed.checkpoint and megatron-core's dist_checkpointing load the tensors of a checkpoint like their own.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

METADATA = ".metadata"
COMMON = "common.pt"
CONFIG = "metadata.json"


def write_common(folder: Path, common: Mapping[str, Any]) -> None:
    """`common.pt`, which megatron-core loads first, and the name of the format."""
    torch.save(dict(common), folder / COMMON)
    names = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    (folder / CONFIG).write_text(
        json.dumps(names | {"sharded_backend_version": 1, "common_backend_version": 1}), encoding="utf-8"
    )


def write_metadata(folder: Path, parts: Iterable[Mapping[str, Any]]) -> None:
    """`.metadata`, from the ranks' parts of the index, which name the archive around each tensor's elements."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for part in parts:
        for key, entry in part["tensors"].items():
            properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
            known = tensors.setdefault(key, TensorStorageMetadata(properties, torch.Size(entry["shape"]), []))
            for _, offset, shape, start, length in entry["pieces"]:
                where = torch.Size(offset)
                # torch finds a piece by tensor, offset and its position in this list
                places[MetadataIndex(key, where, len(known.chunks))] = _StorageInfo(part["file"], start, length)
                known.chunks.append(ChunkStorageMetadata(where, torch.Size(shape)))
    with (folder / METADATA).open("wb") as stream:
        pickle.dump(Metadata(state_dict_metadata=tensors, planner_data={}, storage_data=places), stream)
