"""What a run changes in its process, and gives back: the process group, threads, determinism."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(hours=1)
"""How long ranks wait for each other: rank 0 may be preprocessing a large corpus meanwhile."""


@contextmanager
def process_group(cuda: bool) -> Iterator[None]:
    """The job's process group: torchrun's where it started us, else a group of one without a port; somebody else's is left alone."""
    if dist.is_initialized():
        yield
        return
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if cuda else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=PATIENCE)
    else:
        dist.init_process_group(backend, timeout=PATIENCE, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def process_settings(train: Mapping[str, Any]) -> Iterator[None]:
    """`train.threads` (torch's threads for one operation) and `train.deterministic`, as long as the run lasts."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if train.get("threads"):
        torch.set_num_threads(int(train["threads"]))
    if train.get("deterministic"):
        # warn only: megatron-core uses operations that have no deterministic form on CUDA
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def data_parallel() -> tuple[int, int]:
    """This rank's number among those that read different data, and how many there are."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    return dist.get_rank(), dist.get_world_size()
