"""Answers of a played GPU that torch's CPU build would not give, or would give otherwise: random states, torch.accelerator, memory, pinned tensors, torch.compile."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from mpbridge.backend.devices.redirect import NullEvent, NullStream, get_state, is_pinned, nothing, pin, set_state
from mpbridge.common.replacement import Patch
from mpbridge.te_cpu.played import Played
from mpbridge.te_cpu.refusals import refused_graph

_COUNTED = (
    "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes",
)  # fmt: skip
_SINGLE = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "max_split_size",
)
_logger = logging.getLogger("mpbridge.te_cpu")


def _statistics(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """The caching allocator's statistics by torch's names, all zero: nothing is allocated on a GPU. Source: torch.cuda.memory_stats' documentation."""

    def stat() -> dict[str, int]:
        return dict.fromkeys(("current", "peak", "allocated", "freed"), 0)

    pools = {name: {pool: stat() for pool in ("all", "large_pool", "small_pool")} for name in _COUNTED}
    return pools | {name: stat() for name in ("oversize_allocations", "oversize_segments")} | dict.fromkeys(_SINGLE, 0)


def _set_states(states: Iterable[torch.Tensor]) -> None:
    """Sets the generator that stands for every GPU's from the first state."""
    for state in list(states)[:1]:
        set_state(state)


def _seed() -> None:
    torch.default_generator.seed()


class _Index:
    """`torch.cuda.device(...)` and torch.accelerator.device_index(...): there is only one."""

    def __init__(self, *args: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


def _accelerator(played: Played, devices: int, memory: Callable[..., tuple[int, int]]) -> dict[str, Any]:
    zero = (
        "current_device_index",
        "current_device_idx",
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
    )
    idle = (
        "set_device_index", "set_device_idx", "set_stream", "synchronize", "empty_cache", "empty_host_cache", "reset_peak_memory_stats",
        "reset_accumulated_memory_stats",
    )  # fmt: skip
    return {
        **{name: lambda *args, **kwargs: 0 for name in zero},
        **dict.fromkeys(idle, nothing),
        "is_available": lambda: True,
        "device_count": lambda: devices,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_stream": lambda device=None: NullStream(),
        "device_index": _Index,
        "get_memory_info": memory,
        "memory_stats": lambda device_index=None: torch.cuda.memory_stats(),
        "Graph": refused_graph("Graph", "torch.accelerator"),
    }


def answers(played: Played, devices: int, memory: Callable[..., tuple[int, int]]) -> Iterator[Patch]:
    """The replacements. devices: GPUs of the played node. memory: (free, total) bytes."""
    cuda: Any = torch.cuda
    yield cuda, "device", _Index
    for owner in (cuda, cuda.memory):
        yield owner, "memory_stats_as_nested_dict", _statistics
    for owner in (cuda, cuda.random):
        yield owner, "get_rng_state_all", lambda: [get_state() for _ in range(devices)]
        yield owner, "set_rng_state_all", _set_states
        for name in ("seed", "seed_all"):
            yield owner, name, _seed
        yield owner, "initial_seed", torch.default_generator.initial_seed
    yield cuda, "default_generators", (torch.default_generator,) * devices
    for name, answer in _accelerator(played, devices, memory).items():
        if hasattr(torch.accelerator, name):
            yield torch.accelerator, name, answer
    yield torch, "Stream", NullStream
    yield torch, "Event", NullEvent
    yield torch.Tensor, "pin_memory", pin
    yield torch.Tensor, "is_pinned", is_pinned
    yield torch, "compile", _noted(torch.compile, played)


def _noted(original: Any, played: Played) -> Any:
    """torch.compile that says once that nothing is compiled, unless a library asked whose own fusions are compiled everywhere."""
    said: list[bool] = []

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        asker = _asker()
        if not said and not asker.startswith(("megatron.core", "transformer_engine")):
            said.append(True)
            _logger.warning(
                "torch.compile (called by %s) compiles nothing while %s is played: functions run as they are written, and code that the compiler would refuse on a GPU, as under fullgraph=True, passes",
                asker,
                played.machine.label,
            )
        return original(*args, **kwargs)

    return compile


def _asker() -> str:
    """The module that called, beyond ours and torch's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("mpbridge", "torch"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "?"))
