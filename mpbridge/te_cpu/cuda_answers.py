"""Answers of a played GPU that torch's CPU build would not give, or would give otherwise: random states, torch.accelerator, memory, pinned tensors, torch.compile."""

import functools
import logging
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from mpbridge.backend.devices.redirect import (
    HostEvent,
    NullStream,
    get_state,
    is_pinned,
    names_cuda,
    nothing,
    pin,
    same,
    set_state,
)
from mpbridge.common.upstream import Patch
from mpbridge.te_cpu.played import Played
from mpbridge.te_cpu.refusals import REFUSED, refused_name
from mpbridge.te_cpu.sides import on_host

_COUNTED = (
    "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes",
)  # fmt: skip
_SINGLE = (
    "num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free", "max_split_size"
)  # fmt: skip
_ZERO = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "utilization", "memory_usage", "device_memory_used", "get_sync_debug_mode",
)  # fmt: skip
_IDLE = (
    "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached", "reset_accumulated_memory_stats",
    "reset_accumulated_host_memory_stats", "reset_peak_host_memory_stats", "caching_allocator_enable", "set_per_process_memory_fraction",
    "set_sync_debug_mode", "ipc_collect", "init", "_lazy_init", "set_stream", "_record_memory_history",
)  # fmt: skip
"""Functions of torch.cuda and torch.accelerator that report memory, or do what needs no doing: nothing is allocated on a GPU."""
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


def _unoccupied() -> int:
    """Bytes of this machine's memory that a program can still have, as far as Linux tells: what one that asks before it allocates really gets."""
    try:
        found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else sys.maxsize


def _seed() -> None:
    torch.default_generator.seed()


_NCCL = (2, 27, 5)
"""There is no NCCL here, and scripts ask only whether it is recent."""


def _torch_cuda(played: Played, devices: int) -> dict[str, Any]:
    """Names of torch.cuda, torch.cuda.memory and torch.cuda.streams."""
    (major, minor), total = played.capability, played.machine.memory_bytes
    kinds = {name: getattr(torch, name) for name in torch.cuda.__all__ if name.endswith(("Tensor", "Storage"))}
    return kinds | {
        **{name: lambda *args, **kwargs: 0 for name in _ZERO},
        **dict.fromkeys(_IDLE, nothing),
        "mem_get_info": lambda *args, **kwargs: (min(total, _unoccupied()), total),
        "get_per_process_memory_fraction": lambda *args, **kwargs: 1.0,
        "current_device": _current_device,
        "set_device": _set_device,
        "device": _Index,
        "device_of": _Index,
        "memory_stats_as_nested_dict": _statistics,
        "host_memory_stats_as_nested_dict": dict,
        "memory_snapshot": lambda *args, **kwargs: [],
        "_snapshot": lambda *args, **kwargs: {"segments": [], "device_traces": []},
        "list_gpu_processes": lambda device=None: "GPU:0\nno processes are running",
        "get_allocator_backend": lambda: "native",
        "caching_allocator_disabled": _Index,
        "can_device_access_peer": lambda device, peer: device != peer and max(device, peer) < devices,
        "is_tf32_supported": lambda: played.capability >= (8, 0),
        "get_arch_list": lambda: [f"sm_{major}{minor}"],
        "cudart": _Runtime,
        "StreamContext": _Index,
    }


_current = [0]
"""The index that the process has set: its local rank under torchrun."""


def _current_device() -> int:
    return _current[0]


def _set_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    if index is not None and index >= 0:
        _current[0] = index


class _Runtime:
    """`torch.cuda.cudart()`, which scripts ask to start and stop a profiler."""

    cudaProfilerStart = cudaProfilerStop = staticmethod(lambda: 0)

    def __getattr__(self, name: str) -> Any:
        return refused_name(f"torch.cuda.cudart().{name}", "it is a function of CUDA's runtime")


def _refusals() -> Iterator[Patch]:
    """Every name of `REFUSED` that this torch has; a class stays one, since libraries inspect it."""
    for full, reason in REFUSED.items():
        place, name = full.split(".")
        owner: Any = getattr(torch, place)
        if not hasattr(owner, name):
            continue
        refuse, found = refused_name(f"torch.{full}", reason), getattr(owner, name)
        if isinstance(found, types.ModuleType):
            own = [one for one, value in vars(found).items() if getattr(value, "__module__", None) == found.__name__]
            yield from (
                (found, one, refused_name(f"torch.{full}.{one}", reason)) for one in own if one != "__getattr__"
            )
        else:
            yield owner, name, type(name, (found,), {"__new__": refuse}) if isinstance(found, type) else refuse


def _loads_on_cpu(original: Any) -> Any:
    """torch.load that puts on the CPU what is asked for, or was saved, on a GPU."""

    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is None or isinstance(map_location, dict) or names_cuda(map_location):
            map_location = "cpu"
        return original(f, map_location, *args, **kwargs)

    return load


class _Index(nullcontext[None]):
    """`torch.cuda.device(...)` and torch.accelerator.device_index(...): there is only one."""

    def __init__(self, *args: Any) -> None:
        super().__init__()


def _accelerator(devices: int, memory: Any) -> dict[str, Any]:
    return {
        **{name: lambda *args, **kwargs: 0 for name in _ZERO},
        **dict.fromkeys((*_IDLE, "synchronize", "empty_cache", "empty_host_cache"), nothing),
        **dict.fromkeys(("current_device_index", "current_device_idx"), _current_device),
        **dict.fromkeys(("set_device_index", "set_device_idx"), _set_device),
        "is_available": lambda: True,
        "device_count": lambda: devices,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_stream": lambda device=None: NullStream(),
        "device_index": _Index,
        "get_memory_info": memory,
        "memory_stats": lambda device_index=None: torch.cuda.memory_stats(),
    }


def answers(played: Played, devices: int) -> Iterator[Patch]:
    """The replacements. devices: GPUs of the played node."""
    cuda: Any = torch.cuda
    own = _torch_cuda(played, devices)
    for name, value in own.items():
        for owner in (cuda, cuda.memory, cuda.streams):  # torch's own test helpers ask the second
            if name in vars(owner):
                yield owner, name, value
    _current[0] = 0
    yield torch.Tensor, "get_device", lambda tensor: -1 if on_host(tensor) else _current[0]
    yield from _refusals()
    yield cuda.nccl, "version", lambda: _NCCL
    yield torch._C, "_cuda_attach_out_of_memory_observer", nothing
    yield torch, "load", _loads_on_cpu(torch.load)
    for storage in (torch.UntypedStorage, torch.storage.TypedStorage):
        yield storage, "cuda", same
    for full, module in list(sys.modules.items()):  # each optimizer has it by name
        if full.startswith("torch.optim.") and hasattr(module, "_get_capturable_supported_devices"):
            yield module, "_get_capturable_supported_devices", lambda *args, **kwargs: ["cuda", "cpu"]
    for owner in (cuda, cuda.random):
        yield owner, "get_rng_state_all", lambda: [get_state() for _ in range(devices)]
        yield owner, "set_rng_state_all", _set_states
        for name in ("seed", "seed_all"):
            yield owner, name, _seed
        yield owner, "initial_seed", torch.default_generator.initial_seed
    yield cuda, "default_generators", (torch.default_generator,) * devices
    for name, answer in _accelerator(devices, own["mem_get_info"]).items():
        if hasattr(torch.accelerator, name):
            yield torch.accelerator, name, answer
    yield torch, "device", _device(torch.device)
    profiler: Any = torch.profiler
    for owner in (profiler, profiler.profiler):
        yield owner, "profile", _profile(profiler.profile)
    yield torch, "Stream", NullStream
    yield torch, "Event", HostEvent
    yield torch.Tensor, "pin_memory", pin
    yield torch.Tensor, "is_pinned", is_pinned
    yield torch, "compile", _noted(torch.compile, played)


def _device(original: Any) -> Any:
    """torch.device, of which torch's CPU build makes none from an index: it is one of the accelerator's. A class under torch's name, for isinstance, annotations and pickle."""

    def make(*args: Any, **kwargs: Any) -> Any:
        index = args[0] if args else kwargs.get("type", kwargs.get("index") if len(kwargs) == 1 else None)
        if len(args) + len(kwargs) == 1 and isinstance(index, int) and not isinstance(index, bool):
            return original("cuda", index)
        return original(*args, **kwargs)

    return class_of(original, make, __module__="torch", __qualname__="device", __doc__=original.__doc__)


def class_of(original: Any, make: Callable[..., Any], **attributes: Any) -> Any:
    """A class in the place of `original`, whose instances are that one's, made by `make`."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    return Meta(original.__name__, (), attributes)


def _profile(original: Any) -> Any:
    """torch.profiler.profile, whose kernels all run on the CPU."""

    class Profile(original):  # type: ignore[misc]
        def __init__(self, *, activities: Any = None, **how: Any) -> None:
            super().__init__(activities=[torch.profiler.ProfilerActivity.CPU], **how)

    return Profile


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
