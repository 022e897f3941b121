"""Functions without a kernel here, with the reasons; and the extension's answers about the hardware."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpbridge.common.errors import Refused
from mpbridge.common.transformer_engine import GEMM_ENTRIES
from mpbridge.te_cpu.cuda_states import GRAPHS
from mpbridge.te_cpu.played import now
from mpbridge.te_cpu.registry import kernel

_ATTENTION = "fused attention is implemented by cuDNN and FlashAttention: use the unfused backend (attention_backend=unfused, NVTE_UNFUSED_ATTN=1)"
_USERBUFFERS = "Userbuffers overlap communication with GEMMs in GPU memory: leave tp_comm_overlap off"
_NVSHMEM = "NVSHMEM is a GPU library"
_EXPERTS = "expert dispatch by NCCL needs GPUs: use the all-to-all or all-gather dispatcher"
_CONTEXT = "this belongs to the fused attention kernels: context parallelism runs without them (megatron-core's local attention)"
_SOLVER = "cuSolverMp is a GPU library"
_GROUPED = "grouped tensors are quantized here from release 2.20 on: before, GroupedLinear runs without them"

REASONS: Mapping[str, str] = {
    **dict.fromkeys(
        ("fused_attn_fwd", "fused_attn_bwd", "fa_prepare_fwd", "fa_prepare_bwd", "copy_to_kv_cache"), _ATTENTION
    ),
    **dict.fromkeys(
        (
            "multi_tensor_transpose_to_bhsd",
            "multi_tensor_pad_last_dim",
            "multi_tensor_swizzle_scales_for_gemm_unchecked_",
        ),
        _ATTENTION,
    ),
    **dict.fromkeys(
        (
            "CommOverlap",
            "CommOverlapP2P",
            "CommOverlapHelper",
            "CommOverlapBase",
            "CommOverlapP2PBase",
            "CommOverlapCore",
        ),
        _USERBUFFERS,
    ),
    "bulk_overlap_ag_with_external_gemm": _USERBUFFERS,
    **dict.fromkeys(
        (
            "init_nvshmem_backend",
            "create_nvshmem_tensor",
            "nvshmem_send_on_current_stream",
            "nvshmem_wait_on_current_stream",
            "nvshmem_finalize",
        ),
        _NVSHMEM,
    ),
    **dict.fromkeys(
        (
            "ep_initialize",
            "ep_finalize",
            "ep_get_zero_copy",
            "ep_handle_mem_size",
            "ep_prepare",
            "ep_prepare_and_dispatch",
            "ep_dispatch",
            "ep_combine",
            "ep_dispatch_bwd",
            "ep_combine_bwd",
            "ep_zero_copy_supported",
        ),
        _EXPERTS,
    ),
    **dict.fromkeys(
        (
            "thd_second_half_lse_correction",
            "thd_read_second_half_lse",
            "thd_out_correction",
            "thd_grad_correction",
            "thd_sequence_order_to_cp_rank_order",
            "thd_cp_rank_order_to_sequence_order",
            "thd_copy_valid_tokens_from_per_split_to_rank_local",
        ),
        _CONTEXT,
    ),
    **dict.fromkeys(("cusolvermp_ctx_create", "cusolvermp_ctx_destroy", "newton_schulz"), _SOLVER),
    **dict.fromkeys(
        (
            "group_quantize",
            "group_dequantize",
            "bgrad_group_quantize",
            "group_requantize_inplace",
            "nvfp4_group_quantize_with_amax",
            "nvfp4_quantize_with_amax",
            "grouped_swizzle_for_gemm",
            *(name for name in GEMM_ENTRIES if name.startswith("te_general_grouped_gemm_for_")),
        ),
        _GROUPED,
    ),
}
"""Name in transformer_engine_torch -> why it has no kernel on a CPU."""
CLASSES = frozenset(name for name, reason in REASONS.items() if reason is _USERBUFFERS and name.startswith("Comm"))


_OURS = str(Path(__file__).resolve().parents[1]) + os.sep


def caller() -> str:
    """'module, line' of the calling code: the innermost frame that is not ours."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_OURS):
            return f"{frame.filename}, line {frame.lineno}"
    return "unknown"


def refusal(name: str) -> Callable[..., Any]:
    """A function that raises Refused with the name, the reason and the place of the call."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        reason = REASONS.get(name)
        if reason is None:
            raise Refused(
                f"transformer_engine_torch.{name} has no kernel in mpbridge (called from {caller()}): use a GPU, or open an issue with that name"
            )
        raise Refused(f"transformer_engine_torch.{name} runs on a GPU only: {reason} (called from {caller()})")

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


def refused_name(name: str, reason: str = GRAPHS) -> Callable[..., Any]:
    """A function that raises Refused with the full name that it stands for, the reason and the place of the call."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        graph: Any = sys.modules.get("transformer_engine.pytorch.graph")
        if graph is not None and reason is GRAPHS:
            graph.set_capture_end()  # it began before it made the graph, and its modules compute in another way while one is recorded
        raise Refused(f"{name} runs on a GPU only: {reason} (called from {caller()})")

    return refuse


def refused_class(name: str) -> type:
    """A class by that name, for isinstance(); making one raises Refused."""
    return type(name, (), {"__init__": lambda self, *args, **kwargs: refusal(name)()})


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


@kernel
def get_cudnn_version() -> int:
    """9.15.0: new enough for every release."""
    return 91500


@kernel
def get_num_cublas_streams() -> int:
    """The library's default."""
    return 4


@kernel
def get_grouped_gemm_setup_workspace_size(*args: Any) -> int:
    """No workspace is needed."""
    return 0


@kernel
def device_supports_multicast(*args: Any) -> bool:
    """No."""
    return False


@kernel
def get_stream_priority_range(*args: Any) -> tuple[int, int]:
    """Every stream is the same one."""
    return (0, 0)


@kernel
def ubuf_built_with_mpi() -> bool:
    """No."""
    return False


@kernel
def ep_zero_copy_supported() -> bool:
    """No."""
    return False
