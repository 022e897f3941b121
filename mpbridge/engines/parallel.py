"""Process groups, megatron-core's parallel state and seeds: set up for one engine, and taken back completely."""

from __future__ import annotations

import copy
import gc
import os
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mpbridge.checks.run import Parallel


def start_process_group(cuda: bool, *, timeout_minutes: float = 30.0) -> bool:
    """Joins the world that torchrun describes (RANK, WORLD_SIZE, MASTER_*), or makes a world of one; NCCL on CUDA, else gloo.

    True when this call made it, False when there was one already.
    """
    if dist.is_initialized():
        return False
    backend, timeout = ("nccl" if cuda else "gloo"), timedelta(minutes=timeout_minutes)
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        # no rendezvous, so no port: many single-process runs share a machine
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1, timeout=timeout)
    return True


def stop_process_group() -> None:
    """Leaves the world, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _core_globals() -> list[Any]:
    """Owners of megatron-core's process-wide state: their upper-case names (and the two class attributes) are what an engine changes."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as core_random
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    return [parallel_state, core_random, MoEAuxLossAutoScaler, MTPLossAutoScaler]


def _is_state(name: str, value: Any) -> bool:
    return (name.isupper() or name in ("main_loss_backward_scale", "_global_process_group_list")) and not callable(value)


def _snapshot() -> list[tuple[Any, str, Any]]:
    found = []
    for owner in _core_globals():
        for name, value in vars(owner).items():
            if _is_state(name, value) or name == "_CUDA_RNG_STATE_TRACKER":
                found.append((owner, name, copy.copy(value) if isinstance(value, (list, dict)) else value))
    return found


class ModelParallel:
    """megatron-core's parallel state, seeded, for as long as one engine lives."""

    def __init__(self, sizes: Parallel, *, seed: int, optimizer_instances: int = 1) -> None:
        self._saved = _snapshot()
        self._groups = set(dist.distributed_c10d._world.pg_map)
        try:
            self._initialize(sizes, seed, optimizer_instances)
        except BaseException:
            self.stop()
            raise

    def _initialize(self, sizes: Parallel, seed: int, optimizer_instances: int) -> None:
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(
            sizes.tensor,
            sizes.pipeline,
            sizes.virtual_pipeline,
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.expert_tensor,
            num_distributed_optimizer_instances=optimizer_instances,
        )
        seed_everything(seed)

    def stop(self) -> None:
        """Destroys the process groups that were made here and puts megatron-core's globals back."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        gc.collect()
        if dist.is_initialized():
            for group in [g for g in dist.distributed_c10d._world.pg_map if g not in self._groups]:
                dist.destroy_process_group(group)
        for owner, name, value in self._saved:
            setattr(owner, name, value)


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy, torch and megatron-core's trackers; pipeline stages differ, tensor-parallel ranks share the default generator."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    # 100 apart, as megatron-core's own training script spaces its stages
    staged = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(staged)
    np.random.seed(staged % 2**32)
    model_parallel_cuda_manual_seed(staged)
    torch.manual_seed(staged)


def mean_over_data(values: torch.Tensor) -> torch.Tensor:
    """`values` averaged over the data-parallel group (context-parallel ranks included), in place."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() > 1:
        dist.all_reduce(values, group=group)
        values /= group.size()
    return values


def from_last_stage(values: torch.Tensor) -> torch.Tensor:
    """`values` of the last pipeline stage, on every stage."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        dist.broadcast(values, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return values


def on_every_chunk(functions: list[Callable[..., Any]]) -> Any:
    """What the schedules want: the one function, or the list of them where stages interleave."""
    return functions[0] if len(functions) == 1 else functions
