"""Measures the machine it runs on: matrix products by dtype, memory bandwidth, launches of a layer, and collectives under torchrun."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from mpbridge.backend.devices.collectives import collective_device
from mpbridge.common.probe import this_machine


def measure(seconds: float) -> str | None:
    """The machine file's text; None on ranks other than 0. seconds: approximate total duration."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)  # the timer waits for this one
    joined = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if joined and not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    each = seconds / 6
    size = 8192 if cuda else 1024
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16} | ({"fp16": torch.float16} if cuda else {})
    peak = {name: 2 * size**3 / _median(_product(size, dtype, device), each) / 1e12 for name, dtype in dtypes.items()}
    bandwidth = _bandwidth(each, device)
    link = _link(each, device) if joined else None
    small = torch.ones(8, device=device)
    launches = _median(lambda: [small.add_(1.0) for _ in range(_OPERATIONS)], each)
    if joined and dist.get_rank() != 0:
        return None
    return _machine_file(peak, bandwidth, link, launches, cuda)


def _machine_file(peak: Mapping[str, float], bandwidth: float, link: float | None, launches: float, cuda: bool) -> str:
    """peak: TFLOP/s by dtype; link: None if there was no other process to send to; launches: seconds for an MoE layer."""
    here = this_machine()
    lines = [
        "# written by mpbridge calibrate: measured rates, so the constants of what was measured are 1",
        f"machine: {'cpu' if not cuda else here.name.lower()}",
        f"name: {here.name}, measured",
        "peak: # TFLOP/s",
        *(f"  {name}: {value:.6g}" for name, value in peak.items()),
        f"bandwidth: {bandwidth:.6g}",
    ]
    if link is not None:
        lines += [f"nvlink: {link:.6g}", f"domain: {dist.get_world_size()}"]
    elif not cuda:
        lines += ["nvlink: 1.0e+9 # not measured: one process", "domain: 1"]
    lines += [
        "constants:",
        *(f"  gemm_{name}: 1.0" for name in peak if name != "fp16"),
        "  grouped: 1.0",
        "  memory: 1.0",
        "  optimizer: 1.0",
        "  data: 1.0",
        *(() if cuda else ("  attention: 1.0",)),
        f"  host: {launches * 1000:.6g} # ms for the launches of an MoE layer",
    ]
    return "\n".join(lines) + "\n"


def _median(work: Callable[[], Any], seconds: float, *, together: bool = False) -> float:
    """Median seconds of `work`, repeated for about `seconds`. together: it is a collective, which all ranks repeat as often as the first."""
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    if not together:
        return timer.blocked_autorange(min_run_time=seconds).median
    count = torch.tensor([seconds / timer.timeit(1).median / _BLOCKS], device=collective_device())
    dist.broadcast(count, 0)
    return statistics.median(timer.timeit(max(1, int(count))).median for _ in range(_BLOCKS))


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    a, b = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    return lambda: a @ b


def _bandwidth(seconds: float, device: torch.device) -> float:
    """Bytes per second of a copy, read plus written."""
    source = torch.empty(2**28 if device.type == "cuda" else 2**25, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / _median(lambda: target.copy_(source), seconds)


def _link(seconds: float, device: torch.device) -> float:
    """Bytes per second and direction of a reduce-scatter over all processes."""
    ranks = dist.get_world_size()
    whole = torch.ones(ranks * 2**20, device=device)
    if device.type == "cpu":
        # not every gloo has reduce_scatter_tensor; an all-reduce moves twice as much
        took = _median(lambda: dist.all_reduce(whole), seconds, together=True)
        return 2 * whole.numel() * 4 * (ranks - 1) / ranks / took
    part = torch.empty(2**20, device=device)
    took = _median(lambda: dist.reduce_scatter_tensor(part, whole), seconds, together=True)
    return whole.numel() * 4 * (ranks - 1) / ranks / took


_BLOCKS = 9
"""Means of which a collective's median is taken."""
_OPERATIONS = 250
"""Small operations that represent the launches of an MoE layer, forward and backward."""
