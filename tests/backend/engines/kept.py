"""An engine's state saved and taken back without a run around it, in the format of a run's checkpoints."""

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mpbridge.backend.megatron import sharded
from mpbridge.training.checkpoint import store
from mpbridge.training.checkpoint.format import STATE, encoded
from mpbridge.training.checkpoint.reader import Contents
from mpbridge.training.checkpoint.writer import indexed, staged, write


def keep(state: Any, folder: Path) -> Path:
    """Saves; every rank calls it. Returns the sealed checkpoint."""
    common = sharded.common(state)
    partial = folder / ".partial"
    if dist.get_rank() == 0:
        partial.mkdir(parents=True)
        (partial / STATE).write_text(json.dumps(encoded(common)))
    dist.barrier()
    write(partial, dist.get_rank(), staged(state))
    dist.barrier()
    if dist.get_rank() == 0:
        store.seal(partial, 1, known=indexed(partial, dist.get_world_size()))
    dist.barrier()
    return folder / store.name_of(1)


def take(state: Any, place: Path) -> dict[str, Any]:
    """What a state asks for, with what is equal on all ranks."""
    with Contents(place) as contents:
        return _merged(dict(contents.common()), contents.load(state))


def _merged(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {
            name: _merged(one[name], other[name]) if name in one and name in other else (one | other)[name]
            for name in one | other
        }
    return other
