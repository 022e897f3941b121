"""`mamba_ssm` and `causal_conv1d` on a CPU: modules with the names that megatron-core's Mamba layers import, over `mpbridge.numerics.mamba`."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpbridge.common.errors import Refused
from mpbridge.numerics import mamba

_IN_CORE = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
"""Kernels for inference, imported by megatron-core's mixer whether or not Triton is installed."""


def _absent(name: str) -> Any:
    def refuse(*given: Any, **named: Any) -> None:
        raise Refused(
            f"{name} is a kernel for inference: on a CPU Mamba layers are trained and evaluated on whole sequences"
        )

    refuse.__name__ = name
    return refuse


def _named(*names: str) -> dict[str, Any]:
    return {name: getattr(mamba, name, None) or _absent(name) for name in names}


_MEMBERS: dict[str, dict[str, Any]] = {
    "mamba_ssm": {"__version__": mamba.SSM},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layernorm_gated": _named("RMSNorm"),
    "mamba_ssm.ops.triton.ssd_combined": _named("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"),
    "causal_conv1d": {"__version__": mamba.CONVOLUTION, **_named("causal_conv1d_fn", "causal_conv1d_update")},
    "causal_conv1d.causal_conv1d_varlen": _named("causal_conv1d_varlen_states"),
}


@contextmanager
def mamba_on_cpu() -> Iterator[None]:
    """In the block `mamba_ssm` and `causal_conv1d` are importable and compute on the CPU; installed ones, which need CUDA, are hidden. Nests."""
    if getattr(sys.modules.get("mamba_ssm"), "mpbridge", False):
        yield
        return
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in _OWNED}
    made = {name: _module(name, members) for name, members in _MEMBERS.items()}
    if importlib.util.find_spec("triton") is None and _IN_CORE not in sys.modules:
        made[_IN_CORE] = _module(_IN_CORE, _named("tensor_get_slice_after", "tensor_masked_update", "tensor_merge"))
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


_OWNED = ("mamba_ssm", "causal_conv1d")


def _module(name: str, members: dict[str, Any]) -> types.ModuleType:
    made: Any = types.ModuleType(name)
    made.__dict__.update(members)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    made.__path__, made.mpbridge = [], True
    return made  # type: ignore[no-any-return]
