"""Enumerations and types of `transformer_engine_torch`, with the members of each release."""

import enum
import types
from collections.abc import Mapping
from typing import Any

import torch

from mpbridge.common.errors import BadValue
from mpbridge.common.formats import E2M1, E4M3, E5M2, NumberFormat

_MODULE = "transformer_engine_torch"
"""The module name in pickles, so that pickles written on a GPU load here and ours load there."""


class DType(enum.IntEnum):
    """Transformer Engine's number for a dtype (`transformer_engine::DType`); 1, 3 and 9 are not exposed to Python."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


DType.__module__ = _MODULE
DType.__str__ = enum.Enum.__str__  # type: ignore[method-assign]  # "DType.kFloat8E4M3" as in pybind; since Python 3.11 an IntEnum prints the number
TORCH: Mapping[int, torch.dtype] = types.MappingProxyType({
    DType.kByte: torch.uint8, DType.kInt32: torch.int32, DType.kFloat32: torch.float32, DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16, DType.kFloat8E4M3: torch.uint8, DType.kFloat8E5M2: torch.uint8,
})  # fmt: skip
_FORMAT: Mapping[int, NumberFormat] = types.MappingProxyType(
    {DType.kFloat8E4M3: E4M3, DType.kFloat8E5M2: E5M2, DType.kFloat4E2M1: E2M1}
)


def torch_dtype(code: Any) -> torch.dtype:
    """The torch dtype of a `DType` (or of its number, or a torch dtype itself); FP8 is stored as uint8. Raises BadValue."""
    if isinstance(code, torch.dtype):
        return code
    if int(code) not in TORCH:
        raise BadValue(f"Transformer Engine's dtype {code!r} has no torch dtype (expected one of {list(DType)})")
    return TORCH[int(code)]


def number_format(code: Any) -> NumberFormat:
    """The low-precision format of a `DType`; raises BadValue for another dtype."""
    if int(code) not in _FORMAT:
        raise BadValue(f"Transformer Engine's dtype {code!r} is not a low-precision format (expected FP8 or FP4)")
    return _FORMAT[int(code)]


_QKV_FORMAT = ("SBHD", "BSHD", "THD", "BSHD_2SBHD", "SBHD_2BSHD", "THD_2BSHD", "THD_2SBHD")
_QKV_LAYOUT = (
    "SB3HD", "SBH3D", "SBHD_SB2HD", "SBHD_SBH2D", "SBHD_SBHD_SBHD", "BS3HD", "BSH3D", "BSHD_BS2HD", "BSHD_BSH2D",
    "BSHD_BSHD_BSHD", "T3HD", "TH3D", "THD_T2HD", "THD_TH2D", "THD_THD_THD", "SBHD_BSHD_BSHD", "BSHD_SBHD_SBHD",
    "THD_BSHD_BSHD", "THD_SBHD_SBHD", "Paged_KV_BSHD_BSHD_BSHD", "Paged_KV_BSHD_SBHD_SBHD", "Paged_KV_SBHD_BSHD_BSHD",
    "Paged_KV_SBHD_SBHD_SBHD", "Paged_KV_THD_BSHD_BSHD", "Paged_KV_THD_SBHD_SBHD",
)  # fmt: skip
_PLAIN: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "NVTE_Bias_Type": ("NVTE_NO_BIAS", "NVTE_PRE_SCALE_BIAS", "NVTE_POST_SCALE_BIAS", "NVTE_ALIBI"),
        "NVTE_Mask_Type": (
            "NVTE_NO_MASK", "NVTE_PADDING_MASK", "NVTE_CAUSAL_MASK", "NVTE_PADDING_CAUSAL_MASK",
            "NVTE_CAUSAL_BOTTOM_RIGHT_MASK", "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
        ),
        "NVTE_Softmax_Type": ("NVTE_VANILLA_SOFTMAX", "NVTE_OFF_BY_ONE_SOFTMAX", "NVTE_LEARNABLE_SOFTMAX"),
        "CommOverlapType": ("RS", "AG"),
        "CommOverlapAlgo": (
            "BULK_OVERLAP_AG", "BULK_OVERLAP_RS", "SPLIT_PIPELINED_AG_P2P", "SPLIT_PIPELINED_RS", "SPLIT_PIPELINED_RS_P2P",
            "ATOMIC_GEMM_RS", "ATOMIC_GEMM_AG_P2P", "ATOMIC_GEMM_RS_P2P", "EXTERNAL_BULK_OVERLAP_AG",
        ),
        "FP8FwdTensors": tuple(f"GEMM{i}_{part}" for i in (1, 2, 3) for part in ("INPUT", "WEIGHT", "OUTPUT")),
        "FP8BwdTensors": tuple(f"GRAD_{part}{i}" for i in (1, 2, 3) for part in ("OUTPUT", "INPUT")),
    }
)  # fmt: skip


class FP8TensorMeta:
    """Scales and amax history of delayed scaling, like the extension's class of that name."""

    def __init__(self) -> None:
        self.scale = self.scale_inv = self.amax_history = torch.Tensor()


def _enumeration(name: str, members: tuple[str, ...]) -> Any:
    base: Any = enum.IntEnum
    made = base(name, members, module=_MODULE, start=0)
    made.__str__ = enum.Enum.__str__
    return made


def enumerations(release: tuple[int, ...]) -> dict[str, Any]:
    """Every enumeration and plain type of that release's `transformer_engine_torch`, by name.

    Source: common/util/pybind_helper.h at the release's tag.
    """
    wide = release >= (2, 15)
    backends = ("NVTE_F16_max512_seqlen",) if release < (2, 16) else ()
    formats = _QKV_FORMAT + (("BHSD", "QKV_Format_NOT_SET") if wide else ())
    layouts = _QKV_LAYOUT + (("BHSD_BHSD_BHSD", "QKV_Layout_NOT_SET") if wide else ())
    members = {
        **_PLAIN,
        "NVTE_QKV_Format": tuple(f"NVTE_{name}" for name in formats),
        "NVTE_QKV_Layout": tuple(f"NVTE_{name}" for name in layouts),
        "NVTE_Fused_Attn_Backend": (*backends, "NVTE_F16_arbitrary_seqlen", "NVTE_FP8", "NVTE_No_Backend"),
    }
    if release < (2, 17):
        members["Float8BlockScaleTensorFormat"] = ("GEMM_READY", "COMPACT", "INVALID")
    else:
        members["NVTERoutingMapFormat"] = ("BYTEMAP", "BITMAP_U8")
    if release >= (2, 18):
        members["NVTEScalingMode"] = (
            "NVTE_DELAYED_TENSOR_SCALING", "NVTE_MXFP8_1D_SCALING", "NVTE_BLOCK_SCALING_1D", "NVTE_BLOCK_SCALING_2D",
            "NVTE_NVFP4_1D_SCALING", "NVTE_INVALID_SCALING",
        )  # fmt: skip
        members["NVTEQBHistogramMode"] = ("TWO_KERNEL", "FUSED_ATOMIC")
    made = {name: _enumeration(name, given) for name, given in members.items()}
    return {"DType": DType, "FP8TensorMeta": FP8TensorMeta, **made}
