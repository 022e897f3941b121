"""BF16 matrix products on a CPU without BF16 instructions: as FP32 products, rounded once.

Without AVX-512, torch multiplies BF16 matrices without oneDNN: about 100 times slower than FP32 (1024 x 1024 x 1024 measured: 117 to 2,400 ms against
19 ms, torch 2.13). The product of two BF16 numbers is exact in FP32, so that this is oneDNN's arithmetic: FP32 sums, one rounding.

torch's dispatcher takes the kernels, not its Python functions: backward passes and C++ that multiplies are served too, and what autograd saves stays BF16.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mpbridge.common.upstream import Patch

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
    """Whether torch multiplies BF16 matrices by this CPU's own instructions (oneDNN's: AVX-512 and later)."""
    return bool(_mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


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
