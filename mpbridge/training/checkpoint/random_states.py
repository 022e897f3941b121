"""Random states of a run: read, set again, and as a part of a sharded state dict, one for each rank."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def random_states() -> dict[str, Any]:
    """This rank's states: torch, megatron-core's tracker, Python, NumPy, CUDA where there is one."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    numbers: Any = np.random.get_state()
    kind, words, *rest = numbers
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "tracker": dict(get_cuda_rng_tracker().get_states()),
        "python": random.getstate(),
        "numpy": (kind, words.tolist(), *rest),
    }
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_states(states: Mapping[str, Any]) -> None:
    """Sets what `random_states` read. Raises what torch, NumPy and Python raise for anything else."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.set_rng_state(states["cpu"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(states["numpy"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])


def random_entry(states: dict[str, Any]) -> Any:
    """The states as an entry of a sharded state dict."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return ShardedObject("rng", states, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)
