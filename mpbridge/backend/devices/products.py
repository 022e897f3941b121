"""torch's matrix products: full precision for FP32 factors where a policy promises it, and BF16 on a CPU without BF16 instructions."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpbridge.common.formats import DType
from mpbridge.common.upstream import Patch

if TYPE_CHECKING:
    from mpbridge.precision.policy import PrecisionPolicy


log = logging.getLogger("mpbridge")

PLACES = ("cuda", "mkldnn")
"""torch.backends.PLACE.matmul: GPU and CPU products. Convolutions have a separate setting, which no module here uses."""


class _Held:
    """How many engines hold full precision, and torch's settings before: several engines may exist at once, and the last one restores the settings."""

    holders = 0
    before: tuple[str | None, dict[str, str]] | None = None


def promised(policy: PrecisionPolicy) -> bool:
    """Whether any product of `policy` has FP32 factors."""
    return DType.FP32 in {policy.compute, policy.router, policy.logits} or bool(policy.keep_fp32)


def reduced(policy: PrecisionPolicy) -> dict[str, str]:
    """{'cuda': 'tf32', ...}: the settings of torch that round factors which `policy` promises to multiply in FP32; empty if it promises none."""
    if not promised(policy):
        return {}
    # 'none' and 'ieee' are full precision
    return {place: found for place, found in _settings().items() if found in ("tf32", "bf16")}


def hold(policy: PrecisionPolicy) -> Callable[[], None] | None:
    """Sets products of FP32 factors to IEEE FP32 if `policy` promises them and torch rounds them, and logs this on rank 0.

    Returns a function that restores torch's settings, to be called once; None if the policy promises no such product. torch's settings are process-wide, not per model. NVIDIA's containers allow TF32 through TORCH_ALLOW_TF32_CUBLAS_OVERRIDE.
    """
    if not promised(policy):
        return None
    if found := reduced(policy):
        if _Held.before is None:
            _Held.before = _legacy(), _settings()
        _say(found)
        torch.set_float32_matmul_precision("highest")
    _Held.holders += 1
    return _give_back


def _give_back() -> None:
    _Held.holders -= 1
    if _Held.holders or _Held.before is None:
        return
    (legacy, settings), _Held.before = _Held.before, None
    if legacy is not None:
        torch.set_float32_matmul_precision(legacy)
    for place, value in settings.items():
        if hasattr(_matmul(place), "fp32_precision"):
            _matmul(place).fp32_precision = value


def _say(found: dict[str, str]) -> None:
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    there = ", ".join(f"{place} {value}" for place, value in found.items())
    log.warning(
        "the recipe promises products in FP32, but torch's settings allow less (%s): set to IEEE FP32 until this engine is closed",
        there,
    )


def _settings() -> dict[str, str]:
    found = {}
    for place in PLACES:
        value = getattr(_matmul(place), "fp32_precision", None)
        if value is None and getattr(_matmul(place), "allow_tf32", False):  # torch before 2.9
            value = "tf32"
        if value is not None:
            found[place] = str(value)
    return found


def _matmul(place: str) -> Any:
    return getattr(getattr(torch.backends, place), "matmul", None)


def _legacy() -> str | None:
    """torch's older name of the same setting; None if only the newer one was used, since reading this one is then an error."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


# --- BF16 on a CPU without BF16 instructions: as FP32 products, rounded once -----------------------------------------------------------------
# Without AVX-512, torch multiplies BF16 matrices without oneDNN: about 100 times slower than FP32 (1024 x 1024 x 1024 measured: 117 to 2,400 ms
# against 19 ms, torch 2.13). The product of two BF16 numbers is exact in FP32, so that this is oneDNN's arithmetic: FP32 sums, one rounding.
# torch's dispatcher takes the kernels, not its Python functions: backward passes and C++ that multiplies are served too, and what autograd saves
# stays BF16.
_aten: Any = torch.ops.aten
_library: Any = torch.library.Library
_mkldnn: Any = torch.backends.mkldnn
_NARROW = (torch.bfloat16, torch.float16)
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
"""What linear, matmul, einsum and their gradients come down to."""


class _Kernels:
    """torch's CPU kernels as attributes: setting one registers it with the dispatcher, deleting it gives torch's own back."""

    def __setattr__(self, name: str, kernel: Callable[..., Any]) -> None:
        if name in vars(self):
            delattr(self, name)
        library = _library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Warning only once for all operators"
            )  # that a kernel is replaced is the purpose
            library.impl(name, kernel, "CPU")
        vars(self)[name] = kernel
        _libraries[name] = library

    def __delattr__(self, name: str) -> None:
        del vars(self)[name]
        _libraries.pop(name)._destroy()


_libraries: dict[str, Any] = {}
KERNELS = _Kernels()


def multiplies_bf16() -> bool:
    """Whether torch multiplies BF16 matrices by this CPU's own instructions (oneDNN's: AVX-512 and later; not with oneDNN switched off)."""
    used = _mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    return bool(used and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def half_patches() -> Iterator[Patch]:
    """The kernels, as replacements; none where the CPU multiplies BF16 itself."""
    if not multiplies_bf16():
        for name in _PRODUCTS:
            product = _wide(getattr(_aten, name).out)
            yield KERNELS, name, product
            if name in ("addmm", "baddbmm"):
                yield KERNELS, f"{name}_", _in_place(product)


def _wide(out: Any) -> Callable[..., Any]:
    """A product by its `out` form, which no kernel here replaces: 16-bit operands widened, the result rounded."""

    def product(*tensors: torch.Tensor, **scalars: Any) -> Any:
        dtype = tensors[-1].dtype
        narrow = dtype in _NARROW and all(tensor.dtype is dtype for tensor in tensors)
        if not narrow:
            return out(*tensors, **scalars, out=_aten.empty.memory_format([0], dtype=dtype))
        wide = [_aten._to_copy.default(tensor, dtype=torch.float32) for tensor in tensors]
        result = out(*wide, **scalars, out=_aten.empty.memory_format([0], dtype=torch.float32))
        return _aten._to_copy.default(result, dtype=dtype)

    return product


def _in_place(product: Callable[..., Any]) -> Callable[..., Any]:
    def into(target: torch.Tensor, *tensors: torch.Tensor, **scalars: Any) -> torch.Tensor:
        return _aten.copy_.default(target, product(target, *tensors, **scalars))  # type: ignore[no-any-return]

    return into
