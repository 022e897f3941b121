"""Process groups, megatron-core's parallel state and seeds: set up for one engine, and restored completely."""

import gc
import os
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mpbridge.backend.megatron import process
from mpbridge.common.errors import BadValue
from mpbridge.common.facts import Parallel

_patience = 30.0
"""Minutes until megatron-core's groups time out, the same as the world's; megatron-core's default if the world already existed."""


def start_process_group(cuda: bool, *, timeout_minutes: float = 30.0) -> bool:
    """Joins the world that torchrun describes (RANK, WORLD_SIZE, MASTER_*), or creates a world of one; NCCL on CUDA, else gloo.

    A world of one is always created, not joined: the port in the environment may belong to a parent process.
    Returns True if this call created it, False if a process group already existed.
    """
    if dist.is_initialized():
        return False
    global _patience
    _patience = timeout_minutes
    backend, timeout = ("nccl" if cuda else "gloo"), timedelta(minutes=timeout_minutes)
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    alone = os.environ.get("RANK") == "0" and os.environ.get("WORLD_SIZE") == "1"
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ and not alone:
        dist.init_process_group(backend, timeout=timeout)
    else:
        # no rendezvous, so no port: many single-process runs share a machine
        store = torch._C._distributed_c10d.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    return True


def stop_process_group() -> None:
    """Leaves the world, if any, and destroys all of its groups."""
    _LAYOUTS.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


_LAYOUTS: dict[tuple[Any, Parallel, int], process.State] = {}
"""megatron-core's groups of every layout that this world has had. They are reused and never destroyed one by one: destroying a gloo group while
its last work is being released terminates the process ("terminate called without an active exception"; seen after expert and interleaved pipeline runs)."""


class ModelParallel:
    """megatron-core's parallel state, seeded, for the lifetime of one engine."""

    def __init__(self, sizes: Parallel, *, seed: int, optimizer_instances: int = 1) -> None:
        """Raises BadValue if another engine, or other code, has initialised megatron-core's parallel state: a process has only one."""
        from megatron.core import parallel_state

        if parallel_state.model_parallel_is_initialized():
            raise BadValue(
                "megatron-core's parallel state is in use, expected none: close the other engine first (one engine at a time per process)"
            )
        self._before = process.process_wide()
        self._variables = {name: os.environ.get(name) for name in process.ATTENTION_VARIABLES}
        try:
            layout = (dist.group.WORLD, sizes, optimizer_instances)
            known = _LAYOUTS.get(layout)
            if known is None:
                parallel_state.initialize_model_parallel(
                    sizes.tensor,
                    sizes.pipeline,
                    sizes.virtual_pipeline,
                    context_parallel_size=sizes.context,
                    expert_model_parallel_size=sizes.expert,
                    expert_tensor_parallel_size=sizes.expert_tensor,
                    num_distributed_optimizer_instances=optimizer_instances,
                    distributed_timeout_minutes=_patience,
                )
                _LAYOUTS[layout] = process.layout()
            else:
                process.restore(known)
                process.fresh_buffers()
            seed_everything(seed)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Restores megatron-core's globals; the process groups are kept for the next engine with the same layout."""
        process.restore(self._before)
        process.forget_angles()
        process.forget_router_losses()
        for name, value in self._variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        gc.collect()


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy, torch and megatron-core's trackers; pipeline stages differ, tensor-parallel ranks share the default generator."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    # 100 apart, the offset between stages in Megatron-LM's training script
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
    """The form that the schedules expect: the function itself, or a list of them if stages interleave."""
    return functions[0] if len(functions) == 1 else functions
