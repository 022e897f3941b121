"""megatron-core on a CPU with gloo: one context manager that redirects CUDA calls and restores every one."""

import sys
import threading
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from mpbridge.backend.devices.collectives import gloo_patches, one_by_one
from mpbridge.backend.devices.fused import with_rotary, with_swiglu
from mpbridge.backend.devices.redirect import NullStream, cuda_patches, get_state, set_state, split_sizes
from mpbridge.backend.megatron import process as megatron
from mpbridge.common.errors import BadValue
from mpbridge.common.upstream import MISSING, Replacement


class _StandIn:
    """Makes megatron-core use `fused_adam` as Transformer Engine's FusedAdam, without pretending that Transformer Engine is installed."""

    def __init__(self) -> None:
        self.adam: type | None = None
        self._replacement = Replacement(lambda: megatron.fused_adam_patches(self.adam))
        self._hidden: Any = MISSING

    def enter(self, adam: type) -> None:
        if self.adam not in (None, adam):
            raise BadValue(
                f"cpu_device is active with {self.adam} as FusedAdam, expected the same class, got {adam}: exit the other context first"
            )
        self.adam = adam
        if self._replacement.depth == 0:
            # OptimizerConfig imports FusedAdam by this full name, and sys.modules is consulted before any package is searched
            self._hidden = sys.modules.get(megatron.FUSED_ADAM_MODULE, MISSING)
            stub = types.ModuleType(megatron.FUSED_ADAM_MODULE)
            vars(stub)["FusedAdam"] = adam
            sys.modules[megatron.FUSED_ADAM_MODULE] = stub
        self._replacement.enter()

    def leave(self) -> None:
        self._replacement.leave()
        if self._replacement.depth == 0:
            self.adam = None
            if self._hidden is MISSING:
                sys.modules.pop(megatron.FUSED_ADAM_MODULE, None)
            else:
                sys.modules[megatron.FUSED_ADAM_MODULE] = self._hidden


class _Device:
    """The redirections and the process-wide torch state that megatron-core changes and does not restore."""

    def __init__(self) -> None:
        states = {"get_state": get_state, "set_state": set_state}
        ours = {"split_sizes": split_sizes, "coalescing": one_by_one, "rotary": with_rotary, "swiglu": with_swiglu}
        self.replacement = Replacement(
            lambda: [*cuda_patches(), *gloo_patches(), *megatron.cpu_patches(**states, **ours, stream=NullStream())]
        )
        self._flags: tuple[Any, torch.dtype] | None = None

    def enter(self) -> None:
        self.replacement.enter()
        if self.replacement.depth == 1:
            self._flags = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction, torch.get_default_dtype()

    def leave(self) -> None:
        self.replacement.leave()
        if self.replacement.depth == 0 and self._flags is not None:
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = self._flags[0]
            torch.set_default_dtype(self._flags[1])
            self._flags = None


_DEVICE = _Device()
_STAND_IN = _StandIn()
_LOCK = threading.RLock()


def is_active() -> bool:
    """Whether CUDA calls are currently redirected."""
    return _DEVICE.replacement.depth > 0


@contextmanager
def cpu_device(*, fused_adam: type | None = None) -> Iterator[None]:
    """In the block, megatron-core trains on the CPU; on exit, also by an exception, everything is restored.

    Replacements are process-wide, so threads started in the block see them too; nested and concurrent uses share one set, which is removed by the last exit.
    fused_adam: what megatron-core uses as its Adam (FusedAdam's interface, `mpbridge.backend.engines.optimizers.CpuFusedAdam`); without it torch's AdamW is used,
    which megatron-core's distributed optimizer cannot resume. Raises BadValue if another class is in use.
    """
    megatron.import_all()
    with ExitStack() as undo:
        with _LOCK:
            if fused_adam is not None:
                _STAND_IN.enter(fused_adam)
                undo.callback(_STAND_IN.leave)
            _DEVICE.enter()
            undo.callback(_DEVICE.leave)
            undo = undo.pop_all()
        try:
            yield
        finally:
            with _LOCK:
                undo.close()
