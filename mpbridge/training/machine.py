"""Process settings that a run changes and restores (the process group, threads, determinism), and an engine with a checkpoint's weights, to measure on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpbridge.backend.devices import device_layer
from mpbridge.backend.engines.optimizers import CpuFusedAdam
from mpbridge.backend.engines.parallel import start_process_group, stop_process_group
from mpbridge.backend.engines.registry import build_engine
from mpbridge.common.traits import DEFAULT
from mpbridge.training.base import Training
from mpbridge.training.checkpoint.io import load
from mpbridge.training.metrics import Counters

if TYPE_CHECKING:
    from mpbridge.settings.container import ConfigContainer, Run


@contextmanager
def process_group(cuda: bool, *, minutes: float = 60.0) -> Iterator[None]:
    """The job's process group, for the duration of the run; an existing one is used and left alone. minutes: timeout of collectives."""
    made = start_process_group(cuda, timeout_minutes=minutes)
    try:
        yield
    finally:
        if made:
            stop_process_group()


@contextmanager
def process_settings(train: Mapping[str, Any]) -> Iterator[None]:
    """`train.threads` (torch's threads for one operation) and `train.deterministic`, for the duration of the run."""
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
    """This rank's index among those that read different data, and their number."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    return dist.get_rank(), dist.get_world_size()


def bare(container: ConfigContainer) -> ConfigContainer:
    """A copy whose run is measured: emulated, on an engine that does not shard gradients, without checkpoints and files."""
    made = container.copy()
    made.emulate, made.engine = True, DEFAULT
    for section in (made.ddp, made.optimizer):
        for name in ("use_distributed_optimizer", "overlap_param_gather"):
            if section.get(name):
                section[name] = False
    made.checkpoint, made.logger = {}, {"log_dir": None, "tensorboard": False, "progress": False}
    return made


@contextmanager
def with_weights(run: Run, weights: Path | None, *, cuda: bool) -> Iterator[Any]:
    """The engine of `run`, with the weights of that checkpoint. Requires a process group."""
    with process_settings(run.train), device_layer(cuda, fused_adam=CpuFusedAdam), closing(build_engine(run)) as engine:
        if weights is not None:
            # loading weights alone touches neither schedule nor data
            blank: Any = None
            load(
                Training(run=run, engine=engine, scheduler=blank, feed=blank, counters=Counters()),
                weights,
                weights_alone=True,
            )
        yield engine
