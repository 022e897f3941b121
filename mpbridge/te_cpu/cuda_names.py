"""torch's CUDA names while a machine is played: the device layer's redirections, plus answers as from a GPU."""

import functools
import inspect
import os
import types
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory, device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import _init_utils, fully_sharded_data_parallel

from mpbridge.backend.devices.collectives import gloo_patches, group_of, one_by_one
from mpbridge.backend.devices.redirect import CPU, cuda_patches, names_cuda, nothing, on_cpu
from mpbridge.common.transformer_engine import CUDA_VERSION
from mpbridge.common.upstream import Patch
from mpbridge.numerics.codes import EIGHT_BITS
from mpbridge.numerics.gemm import product
from mpbridge.numerics.operands import Operand
from mpbridge.te_cpu import autocast, premultiplied
from mpbridge.te_cpu.cuda_answers import answers, class_of
from mpbridge.te_cpu.played import Played
from mpbridge.te_cpu.refusals import EXPERTS, refused_name
from mpbridge.te_cpu.sides import with_copies


def _properties(played: Played) -> types.SimpleNamespace:
    major, minor = played.capability
    return types.SimpleNamespace(
        major=major, minor=minor, name=played.machine.name, total_memory=played.machine.memory_bytes, multi_processor_count=132, warp_size=32,
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block_optin=232448, gcnArchName="", uuid="",
        is_integrated=False,
    )  # fmt: skip


def _generator(original: Any) -> Any:
    """A class, since libraries that are imported later annotate with `torch.Generator | None` and call isinstance."""
    return class_of(original, lambda device="cpu": original("cpu" if names_cuda(device) else device))


def _scaled_mm(original: Any) -> Any:
    """torch's FP8 product as cuBLAS computes it, with one scale for each operand, applied to the FP32 sum (torch's CPU kernel scales every factor)."""

    @functools.wraps(original)
    def scaled_mm(
        a: Any,
        b: Any,
        scale_a: Any,
        scale_b: Any,
        bias: Any = None,
        scale_result: Any = None,
        out_dtype: Any = None,
        use_fast_accum: bool = False,
    ) -> Any:
        if scale_a.numel() != 1 or scale_b.numel() != 1 or out_dtype is None or scale_result is not None:
            return original(a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
        left, right = (Operand(x.to(torch.bfloat16), s.float().reshape(())) for x, s in ((a, scale_a), (b, scale_b)))
        return product(left, right, out_dtype, bias)

    return scaled_mm


def played_patches(played: Played) -> Iterator[Patch]:
    """Everything that is replaced while a machine is played."""
    own = {"is_available", "device_count", "current_device"}
    yield from with_copies(
        patch for patch in cuda_patches() if not (patch[0] is torch.cuda and patch[1] in own) and patch[1] != "autocast"
    )
    cuda: Any = torch.cuda
    properties = _properties(played)
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    yield cuda, "is_available", lambda: True
    yield cuda, "is_initialized", lambda: True
    yield cuda, "device_count", lambda: devices
    yield cuda, "get_device_properties", lambda *args, **kwargs: properties
    yield cuda, "get_device_capability", lambda *args, **kwargs: played.capability
    yield cuda, "get_device_name", lambda *args, **kwargs: played.machine.name
    yield cuda, "is_current_stream_capturing", lambda: False
    yield cuda, "is_bf16_supported", lambda *args, **kwargs: played.capability >= (8, 0)
    yield from answers(played, devices)
    for name in ("range_push", "range_pop", "mark"):
        yield cuda.nvtx, name, nothing
    yield cuda.nvtx, "range", lambda *args, **kwargs: nullcontext()
    yield torch, "_scaled_mm", _scaled_mm(torch._scaled_mm)
    yield from autocast.patches()
    yield torch, "Generator", _generator(torch.Generator)
    yield torch.version, "cuda", CUDA_VERSION
    yield torch.Tensor, "_make_wrapper_subclass", staticmethod(on_cpu(torch.Tensor._make_wrapper_subclass))
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided"):
        yield torch.Tensor, name, on_cpu(getattr(torch.Tensor, name))
    for owner in (dist, distributed_c10d):
        yield owner, "_coalescing_manager", one_by_one
    yield DeviceMesh, "from_group", staticmethod(_on_a_cpu(DeviceMesh.from_group))
    for owner in (dist, device_mesh):
        yield owner, "init_device_mesh", _on_a_cpu(device_mesh.init_device_mesh)
    data_parallel = torch.nn.parallel.DistributedDataParallel
    yield data_parallel, "__init__", _without(data_parallel.__init__, "device_ids", "output_device")
    for owner in (_init_utils, fully_sharded_data_parallel):
        yield owner, "_init_device_handle", _played_handle
    yield _init_utils, "_get_compute_device", lambda *args: CPU
    yield torch, "set_default_device", _on_a_cpu(torch.set_default_device)
    yield dist, "is_nccl_available", lambda: True
    yield dist, "ProcessGroupNCCL", _Nccl
    yield _symmetric_memory, "empty", _no_symmetric_memory
    # torch's later releases have these; torch's own fail for want of a GPU's backend, whatever the tensor
    for name, answer in (("set_backend", None), ("is_symm_mem_tensor", False)):
        if hasattr(_symmetric_memory, name):
            yield _symmetric_memory, name, lambda *args, answer=answer: answer
    yield from _collectives()


def _collectives() -> Iterator[Patch]:
    """Groups of NCCL's and what they send, by gloo."""
    movers = {name: _bytes_moved(getattr(dist, name)) for name in _MOVERS if hasattr(dist, name)}
    for owner in (dist, distributed_c10d):
        for name in ("init_process_group", "new_subgroups_by_enumeration"):
            yield owner, name, _on_gloo(getattr(owner, name))
        yield owner, "new_group", _on_gloo(_of_its_ranks(owner.new_group))
        yield owner, "barrier", _without(owner.barrier, "device_ids")
        # one function for both: P2POp compares its own with the caller's
        yield from ((owner, name, function) for name, function in movers.items())
    yield from gloo_patches()
    yield from premultiplied.patches()
    if dist.is_gloo_available():
        yield dist.ProcessGroupGloo, "_comm_ptr", refused_name("ProcessGroupNCCL._comm_ptr", EXPERTS)


_GATHERS = ("all_gather_into_tensor", "all_gather_single", "_all_gather_base")
"""Into one tensor, of which NCCL asks only how many elements it has, gloo also the shape."""
_MOVERS = (
    "all_gather", *_GATHERS, "broadcast", "gather", "scatter", "all_to_all", "all_to_all_single", "send", "recv",
    "isend", "irecv",
)  # fmt: skip
"""Collectives that move elements without computing with them."""


def _bytes_moved(original: Any) -> Any:
    """A collective that sends FP8 elements as bytes: NCCL sends them as they are, gloo knows no such type."""

    def plain(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(plain, value))
        narrow = type(value) in (torch.Tensor, torch.nn.Parameter) and value.dtype in EIGHT_BITS
        return value.detach().view(torch.uint8) if narrow else value

    flat = original.__name__ in _GATHERS

    def sent(value: Any) -> Any:
        return plain(value).view(-1) if flat and type(value) is torch.Tensor and value.is_contiguous() else plain(value)

    @functools.wraps(original)
    def move(*args: Any, **kwargs: Any) -> Any:
        return original(*map(sent, args), **{name: sent(value) for name, value in kwargs.items()})

    return move


def _without(original: Any, *names: str) -> Any:
    """A function that ignores these parameters."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for name in names:
            bound.arguments.pop(name, None)
        return original(*bound.args, **bound.kwargs)

    return call


def _on_gloo(original: Any) -> Any:
    """A function that makes process groups, with gloo when NCCL is requested."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if isinstance(arg, str) and "nccl" in arg else arg for arg in args)
        if "nccl" in str(kwargs.get("backend") or ""):
            kwargs["backend"] = "gloo"
        for name in ("device_id", "pg_options"):
            kwargs.pop(name, None)
        return original(*args, **kwargs)

    return make


def _of_its_ranks(new_group: Any) -> Any:
    """`new_group`, whose ranks find one another by who they are."""

    @functools.wraps(new_group)
    def make(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        ranks = None if ranks is None else list(ranks)
        with group_of(range(dist.get_world_size()) if ranks is None else ranks):
            return new_group(ranks, *args, **kwargs)

    return make


def _no_symmetric_memory(*args: Any, **kwargs: Any) -> Any:
    """As on GPUs without NVLink between them: libraries catch that error (megatron-core) and go on without."""
    raise RuntimeError("symmetric memory: simulated GPUs have no NVLink")


class _Nccl:
    """ProcessGroupNCCL's options, which `_on_gloo` drops; torch's CPU build has no such class."""

    NCCL_CTA_POLICY_DEFAULT, NCCL_CTA_POLICY_EFFICIENCY, NCCL_CTA_POLICY_ZERO = range(3)

    class Options(types.SimpleNamespace):
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__(is_high_priority_stream=is_high_priority_stream, config=types.SimpleNamespace())


def _on_a_cpu(original: Any) -> Any:
    """A function that chooses a device or makes device meshes, of CPUs when CUDA's are requested."""

    def cpus(value: Any) -> Any:
        return "cpu" if names_cuda(value) else value

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        return original(*map(cpus, args), **{name: cpus(value) for name, value in kwargs.items()})

    return make


def _played_handle(state: Any, *args: Any) -> Any:
    """FullyShardedDataParallel's streams and events; torch's own refuses parameters on a CPU where it finds no accelerator."""
    state._device_handle = torch.cuda
    return state
