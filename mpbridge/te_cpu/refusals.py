"""What a played GPU refuses and why: names of torch.cuda and torch.accelerator, functions of the extension without a kernel; and the extension's answers about the hardware."""

import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from mpbridge.common.errors import Refused
from mpbridge.te_cpu.played import KERNELS, kernel, now

# --- the public names of torch.cuda and torch.accelerator that are refused; the others are played, or torch's own --------------------------
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

# --- names of the extension ----------------------------------------------------------------------------------------------------------------
_ATTENTION = "fused attention is implemented by cuDNN and FlashAttention: use the unfused backend (attention_backend=unfused, NVTE_UNFUSED_ATTN=1)"
_USERBUFFERS = "Userbuffers overlap communication with GEMMs in GPU memory: leave tp_comm_overlap off"
_NVSHMEM = "NVSHMEM is a GPU library"
EXPERTS = "expert dispatch by NCCL needs GPUs: use the all-to-all or all-gather dispatcher"
_CONTEXT = "this belongs to the fused attention kernels: context parallelism runs without them (megatron-core's local attention)"
_SOLVER = "cuSolverMp is a GPU library"
_GROUPED = "grouped tensors are quantized here from release 2.20 on: before, GroupedLinear runs without them"

_REASONS = (
    (r"fused_attn_|fa_prepare_|copy_to_kv_cache", _ATTENTION),
    (r"multi_tensor_(transpose_to_bhsd|pad_last_dim|swizzle_scales_for_gemm_unchecked_)", _ATTENTION),
    (r"CommOverlap|bulk_overlap_ag_with_external_gemm", _USERBUFFERS),
    (r"nvshmem_|(init|create)_nvshmem_", _NVSHMEM),
    (r"ep_", EXPERTS),
    (r"thd_", _CONTEXT),
    (r"cusolvermp_|newton_schulz", _SOLVER),
    (r"(bgrad_)?group_|nvfp4_(group_)?quantize_with_amax|grouped_swizzle_|te_general_grouped_gemm_for_", _GROUPED),
)
"""How names in transformer_engine_torch without a kernel on a CPU begin, and why they have none."""


def reason_of(name: str) -> str | None:
    """Why a function of the extension has no kernel here; None: no reason is known."""
    return next((reason for pattern, reason in _REASONS if re.match(pattern, name)), None)


_OURS = str(Path(__file__).resolve().parents[1]) + os.sep


def caller() -> str:
    """'module, line' of the calling code: the innermost frame that is not ours."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_OURS):
            return f"{frame.filename}, line {frame.lineno}"
    return "unknown"


def refusal(name: str) -> Callable[..., Any]:
    """A function that raises Refused with the name, the reason and the place of the call."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        reason = reason_of(name)
        if reason is None:
            raise Refused(
                f"transformer_engine_torch.{name} has no kernel in mpbridge (called from {caller()}): use a GPU, or open an issue with that name"
            )
        raise Refused(f"transformer_engine_torch.{name} runs on a GPU only: {reason} (called from {caller()})")

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


def refused_name(name: str, reason: str = GRAPHS) -> Callable[..., Any]:
    """A function that raises Refused with the full name that it stands for, the reason and the place of the call."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        graph: Any = sys.modules.get("transformer_engine.pytorch.graph")
        if graph is not None and reason is GRAPHS:
            graph.set_capture_end()  # it began before it made the graph, and its modules compute in another way while one is recorded
        raise Refused(f"{name} runs on a GPU only: {reason} (called from {caller()})")

    return refuse


def refused(name: str) -> Any:
    """What stands for a name of the extension: `refusal`, or for one of Userbuffers' classes a class, for isinstance(), that refuses to be made."""
    refuse = refusal(name)
    made = {"__init__": lambda self, *args, **kwargs: refuse()}
    return type(name, (), made) if name.startswith("CommOverlap") else refuse


@kernel
def get_fused_attn_backend(*args: Any, **kwargs: Any) -> Any:
    """No fused backend; from release 2.20 on with the reason."""
    extension: Any = sys.modules["transformer_engine_torch"]
    none = extension.NVTE_Fused_Attn_Backend.NVTE_No_Backend
    return (none, _ATTENTION) if now().release >= (2, 20) else none


@kernel
def get_cublasLt_version() -> int:
    """13.1.0, and from release 2.20 on 13.6.0: new enough for every recipe and for grouped tensors."""
    return 130600 if now().release >= (2, 20) else 130100


_ANSWERS: Mapping[str, Any] = {
    "get_cudnn_version": 91500,  # 9.15.0: new enough for every release
    "get_num_cublas_streams": 4,  # the library's default
    "get_grouped_gemm_setup_workspace_size": 0,
    "get_stream_priority_range": (0, 0),  # every stream is the same one
    **dict.fromkeys(("device_supports_multicast", "ubuf_built_with_mpi", "ep_zero_copy_supported"), False),
}
"""Question about the hardware or the build -> the answer, whatever it is asked with."""
KERNELS.update({name: lambda *args, found=found: found for name, found in _ANSWERS.items()})
