"""Our `transformer_engine_torch`: the table of kernels, the release's enumerations, and refusals for the rest."""

from __future__ import annotations

import importlib
import types
from typing import Any

from mpbridge.te_cpu.enums import enumerations
from mpbridge.te_cpu.refusals import CLASSES, REASONS, refusal, refused_class
from mpbridge.te_cpu.registry import KERNELS

NAME = "transformer_engine_torch"
_SUBJECTS = (
    "activations", "gemm", "moe", "multi_tensor", "norms", "nvfp4_slices", "optimizers", "quantize", "rope", "scaling", "sequences", "softmax",
)  # fmt: skip


class KernelModule(types.ModuleType):
    """The module; a name that it lacks is a function that says so when it is called."""

    mpbridge = True
    """Marks it as ours."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return refused_class(name) if name in CLASSES else refusal(name)


def make_module(release: tuple[int, ...]) -> KernelModule:
    """The module as that Transformer Engine release expects it."""
    for subject in _SUBJECTS:
        importlib.import_module(f"mpbridge.te_cpu.{subject}")
    made = KernelModule(NAME, "Transformer Engine's kernels on a CPU, by mpbridge.")
    for name in REASONS:
        setattr(made, name, refused_class(name) if name in CLASSES else refusal(name))
    for name, value in {**KERNELS, **enumerations(release)}.items():
        setattr(made, name, value)
    return made
