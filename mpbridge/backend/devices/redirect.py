"""Substitutes for CUDA on a CPU: each replaces one torch or megatron-core function; none is installed here.

Attributes are replaced instead of using a TorchFunctionMode: a mode costs about a microsecond on every torch call (1.6 % of a small step),
is popped while backward runs, and is invisible to other threads.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch._dynamo import trace_rules
from torch.utils import _device as contexts

from mpbridge.backend.devices.products import half_patches
from mpbridge.common.upstream import Patch

CPU = torch.device("cpu")

FACTORIES = (
    "arange", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "logspace", "normal", "ones", "ones_like", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "randperm", "scalar_tensor", "tensor", "as_tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
"""torch functions that take device= and pin_memory=; megatron-core passes device="cuda" to tensor, zeros, ones, full and empty."""

MATMULS = ("matmul", "bmm", "mm", "baddbmm", "addmm", "einsum")
"""torch functions whose float16 operands are widened; `Tensor` has the first five as methods too."""


def names_cuda(device: Any) -> bool:
    """Whether `device` means a CUDA device: "cuda", "cuda:1", torch.device("cuda"), or an index (torch reads an int as an accelerator)."""
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing."""


class HostEvent:
    """A CUDA event of a device that runs in order: complete once it is recorded. Times between two of them are the host's."""

    def __init__(self, *args: Any, enable_timing: bool = False, **kwargs: Any) -> None:
        # torch.Event has the device first, torch.cuda.Event whether it is timed
        self.timed, self.at = bool(enable_timing or (args and args[0] is True)), math.nan

    def record(self, *args: Any) -> None:
        """Takes the time."""
        self.at = time.perf_counter()

    wait = synchronize = nothing

    def query(self) -> bool:
        """True: whatever was recorded has completed."""
        return True

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds until `end_event`. Raises ValueError, as torch does, for events without timing or that were not recorded."""
        if not (self.timed and end_event.timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if math.isnan(self.at) or math.isnan(end_event.at):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return 1e3 * (end_event.at - self.at)


class NullStream:
    """A CUDA stream of a device that runs in order; every stream is the same one."""

    cuda_stream = stream_id = priority = 0
    device = torch.device("cuda", 0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = nothing

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """The event, recorded."""
        event = event or HostEvent()
        event.record()
        return event

    def query(self) -> bool:
        """True: nothing is pending."""
        return True

    def is_capturing(self) -> bool:
        """False: there are no CUDA graphs."""
        return False

    def __enter__(self) -> NullStream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NullStream)

    __hash__ = object.__hash__


def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """`factory` with a CUDA device replaced by the CPU; memory that is asked for as pinned is only marked so."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if names_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            if kwargs.pop("pin_memory", None):
                return _marked(factory(*args, **kwargs))
        return factory(*args, **kwargs)

    return create


def _up(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype is torch.float16 else value


def widened(product: Callable[..., Any]) -> Callable[..., Any]:
    """`product` with float16 operands multiplied in float32 and the result rounded to float16.

    CPUs without AVX512-FP16 multiply float16 about 25 times slower than float32 (20 against 104 to 113 GFLOP/s measured), and float32 accumulation with one
    rounding at the end is what a GPU's tensor cores do.
    """

    @functools.wraps(product)
    def multiply(*args: Any, **kwargs: Any) -> Any:
        # einsum's first operand comes after the equation
        first = next((one for one in args if isinstance(one, torch.Tensor)), None)
        if first is None or first.dtype is not torch.float16:
            return product(*args, **kwargs)
        out = kwargs.pop("out", None)
        result = product(*map(_up, args), **{key: _up(value) for key, value in kwargs.items()}).half()
        return result if out is None else out.copy_(result)

    return multiply


def type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type` that calls a CPU tensor 'torch.cuda.FloatTensor': megatron-core's optimizers compare these strings."""

    def type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name = original(self)
            return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)
        wanted = dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype
        return original(self, wanted, *args, **kwargs)

    return type


def to_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.to` and `Module.to` that stay on the CPU when CUDA is requested."""

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        by_keyword = bool(kwargs) and names_cuda(kwargs.get("device"))
        if (args and names_cuda(args[0])) or by_keyword:
            # already there; torch would copy a tensor subclass that calls this inside of its own dispatch
            if len(args) + len(kwargs) == 1 and isinstance(self, torch.Tensor) and self.device == CPU:
                return self
            args = args if by_keyword else (CPU, *args[1:])
        if by_keyword:
            kwargs["device"] = CPU
        return original(self, *args, **kwargs)

    return to


def same(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The object itself: `.cuda()` and `.pin_memory()` on a CPU."""
    return self


def _marked(tensor: Any) -> Any:
    """The tensor, whose storage, and with it every view, says that it is pinned."""
    if type(tensor) in PLAIN:
        tensor.untyped_storage()._mpbridge_pinned = True
    return tensor


def is_pinned(tensor: Any, *args: Any, **kwargs: Any) -> bool:
    """`Tensor.is_pinned` as on a machine with a GPU."""
    return type(tensor) in PLAIN and hasattr(tensor.untyped_storage(), "_mpbridge_pinned")


def pin(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.pin_memory` as on a machine with a GPU: a copy, or the tensor itself if it is pinned already or of a library's own class."""
    return tensor if type(tensor) not in PLAIN or is_pinned(tensor) else _marked(tensor.clone())


PLAIN = (torch.Tensor, torch.nn.Parameter)


class CpuAutocast(torch.autocast):
    """torch.autocast for CPU operations when CUDA's is requested."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if names_cuda(device_type) else device_type, *args, **kwargs)


def split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What megatron-core's `maybe_move_tensor_to_cpu` returns for a CUDA tensor; megatron-core's leaves CPU tensors unconverted, which all-to-all cannot read."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The CPU generator's state: there is only one generator."""
    return torch.get_rng_state()


def set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Sets the CPU generator."""
    torch.set_rng_state(state)


def seed(value: int) -> None:
    """Seeds the CPU generator, which stands for every CUDA generator."""
    torch.default_generator.manual_seed(value)


def _context(original: Any) -> Any:
    """What `with torch.device("cuda"):` enters: the CPU's."""

    class Context(original):  # type: ignore[misc]
        def __init__(self, device: Any) -> None:
            super().__init__(CPU if names_cuda(device) else device)

    return Context


def cuda_patches() -> Iterator[Patch]:
    """All replacements in torch."""
    # what `with torch.device("meta"):` redirects, and what torch.compile knows, is listed once, by identity: torch's functions, not the substitutes
    # for them, which the next layer would not have
    contexts._device_constructors()
    with suppress(AssertionError):  # a layer around this one has replaced some already
        trace_rules.get_torch_obj_rule_map()
    yield contexts, "DeviceContext", _context(contexts.DeviceContext)
    cuda: Any = torch.cuda
    yield cuda, "is_available", lambda: False
    yield cuda, "device_count", lambda: 0
    yield cuda, "current_device", lambda: CPU
    for name in ("set_device", "synchronize", "empty_cache"):
        # one function each: torch.compile keeps one rule per function, and has different ones for these names
        yield cuda, name, lambda *args, **kwargs: None
    yield cuda, "Stream", NullStream
    yield cuda, "Event", HostEvent
    for name in ("current_stream", "default_stream"):
        yield cuda, name, lambda *args, **kwargs: NullStream()
    yield cuda, "stream", lambda stream: nullcontext()
    for owner in (cuda, cuda.random):
        yield owner, "get_rng_state", get_state
        yield owner, "set_rng_state", set_state
        yield owner, "manual_seed", seed
        yield owner, "manual_seed_all", seed
    yield torch, "autocast", CpuAutocast
    for name in FACTORIES:
        yield torch, name, on_cpu(getattr(torch, name))
    yield from half_patches()
    for name in MATMULS:
        yield torch, name, widened(getattr(torch, name))
    for name in ("matmul", "__matmul__", "bmm", "mm", "baddbmm", "addmm"):
        yield torch.Tensor, name, widened(getattr(torch.Tensor, name))
    for name in ("linear", "scaled_dot_product_attention"):
        yield torch.nn.functional, name, widened(getattr(torch.nn.functional, name))
    yield torch.Tensor, "type", type_name(torch.Tensor.type)
    yield torch.Tensor, "to", to_cpu(torch.Tensor.to)
    yield torch.nn.Module, "to", to_cpu(torch.nn.Module.to)
    for owner in (torch.Tensor, torch.nn.Module):
        yield owner, "cuda", same
    yield torch.Tensor, "pin_memory", same
    yield torch.Tensor, "record_stream", nothing
