"""What each public name of torch.cuda and torch.accelerator is while a GPU is played: real, played, or refused with a reason. One table, which the refusals and the docs read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_MEMORY = "there is no memory of a GPU to allocate from"
_BOARD = "it reads a sensor of a real board"
_POINTER = "it is a pointer into CUDA's runtime"
GRAPHS = "CUDA graphs record the work of a GPU: leave them off (cuda_graph_impl=none)"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("cuda.CUDAGraph", "cuda.graph", "cuda.make_graphed_callables", "cuda.graph_pool_handle", "cuda.export_dot", "cuda.export_graph_data", "accelerator.Graph"), GRAPHS),
        **dict.fromkeys(("cuda.caching_allocator_alloc", "cuda.caching_allocator_delete", "cuda.CUDAPluggableAllocator", "cuda.change_current_allocator"), _MEMORY),
        **dict.fromkeys(("cuda.MemPool", "cuda.MemPoolContext", "cuda.use_mem_pool"), _MEMORY),
        **dict.fromkeys(("cuda.temperature", "cuda.power_draw", "cuda.clock_rate"), _BOARD),
        **dict.fromkeys(("cuda.current_blas_handle", "cuda.current_solver_handle", "cuda.ExternalStream", "cuda.get_stream_from_external"), _POINTER),
        "cuda.GreenContext": "it divides the multiprocessors of a GPU",
        **dict.fromkeys(("cuda.jiterator", "cuda._compile_kernel"), "it compiles CUDA kernels at run time"),
        "accelerator.get_device_capability": "a simulated machine has no list of dtypes: ask torch.cuda.get_device_capability",
    }
)  # fmt: skip
"""Name below torch -> why. `cuda_names` makes each raise Refused when it is called."""

REAL: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("cuda.CudaError", "cuda.DeferredCudaCallError", "cuda.cudaStatus", "cuda.check_error", "cuda.has_half", "cuda.has_magma"), "types and constants"),
        **dict.fromkeys(("cuda.get_gencode_flags", "cuda.memory_stats", "cuda.memory_summary", "cuda.host_memory_stats", "cuda.max_memory_cached", "cuda.memory_cached"), "torch's own, over played names"),
        **dict.fromkeys((f"cuda.{name}" for name in ("amp", "graphs", "graph_annotations", "memory", "nccl", "nvtx", "profiler", "random", "sparse", "streams", "tunable")), "modules"),
    }
)  # fmt: skip
"""Name below torch -> what it is: torch's own, unchanged."""

PLAYED_BESIDE = (
    "torch.load(map_location)", "torch.device(index)", "torch.Stream", "torch.Event", "torch.Generator", "torch.profiler.profile", "torch.autocast", "torch.compile (says that nothing is compiled)", "torch.set_default_device",
    "torch.version.cuda", "Tensor.cuda, .to, .is_cuda, .get_device, .pin_memory, .is_pinned, .record_stream, .type", "Module.cuda, .to",
    "UntypedStorage.cuda", "optimizers with capturable=True", "torch.cuda.memory._record_memory_history, ._snapshot, ._dump_snapshot", "torch.cuda.nccl.version",
    "torch.distributed with nccl (on gloo), ProcessGroupNCCL.Options", "symmetric memory (torch's error without NVLink)", "DeviceMesh of CUDA devices", "DistributedDataParallel with device_ids", "FullyShardedDataParallel",
)  # fmt: skip
"""What is played outside of torch.cuda and torch.accelerator."""


def state(name: str, replaced: bool) -> str | None:
    """'real', 'played' or 'refused' for a name such as 'cuda.Stream'; None: it has no state. replaced: whether `cuda_names` replaces it."""
    if name in REFUSED:
        return "refused"
    if name in REAL:
        return None if replaced else "real"
    return "played" if replaced else None
