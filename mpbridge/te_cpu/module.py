"""Our `transformer_engine_torch`: the table of kernels, the release's enumerations, and refusals for the rest."""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mpbridge.te_cpu import autocast
from mpbridge.te_cpu.enums import enumerations
from mpbridge.te_cpu.refusals import refused
from mpbridge.te_cpu.registry import KERNELS

NAME = "transformer_engine_torch"
_SUBJECTS = (
    "activations", "gemm", "grouped", "grouped_gemm", "grouped_tensors", "moe", "multi_tensor", "norms", "nvfp4_slices", "optimizers", "quantize", "rope", "router", "scaled_activations", "scaling", "sequences",
    "softmax",
)  # fmt: skip


class KernelModule(types.ModuleType):
    """The module; a missing name is a function that raises Refused when it is called."""

    mpbridge = True
    """Marks it as ours."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return refused(name)


def make_module(release: tuple[int, ...]) -> KernelModule:
    """The module in the form that this Transformer Engine release expects."""
    for subject in _SUBJECTS:
        importlib.import_module(f"mpbridge.te_cpu.{subject}")
    made = KernelModule(NAME, "Transformer Engine's kernels on a CPU, by mpbridge.")
    for name, function in KERNELS.items():
        place, _, last = name.rpartition(".")
        setattr(_submodule(made, place) if place else made, last, opaque(function))
    for name, value in enumerations(release).items():
        setattr(made, name, value)
    return made


def _submodule(made: KernelModule, name: str) -> KernelModule:
    """The submodule of that name; the extension has some since 2.20."""
    if name not in vars(made):
        setattr(made, name, KernelModule(f"{NAME}.{name}", made.__doc__))
    found: KernelModule = vars(made)[name]
    return found


def opaque(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `kernel` look to torch like one call into compiled code: a dispatch mode (the audit's, a profiler's) sees none of its operations, autocast
    changes none of their dtypes, and autograd sees none of its inputs.
    """

    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), autocast.off():
            if torch._C._len_torch_dispatch_stack() == 0:
                return kernel(*args, **kwargs)
            with _disable_current_modes():
                return kernel(*args, **kwargs)

    return call
