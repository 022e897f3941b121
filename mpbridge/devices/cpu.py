"""megatron-core 0.16.1 on a CPU with gloo: one context manager that redirects CUDA calls and takes every redirection back."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from mpbridge.devices.redirect import Patch, cuda_patches, get_state, set_state, split_sizes
from mpbridge.errors import BadValue

_MISSING = object()

_CORE = (
    "models.gpt",
    "models.gpt.gpt_layer_specs",
    "optimizer",
    "optimizer.distrib_optimizer",
    "distributed",
    "pipeline_parallel.schedules",
    "dist_checkpointing",
    "transformer.moe.moe_utils",
    "transformer.moe.token_dispatcher",
    "transformer.multi_latent_attention",
)
"""Imported before anything is replaced: a module first imported inside would keep replacements under its own names."""


class _Replacement:
    """A set of attribute replacements, installed by the first that enters and taken back by the last that leaves, in any thread."""

    def __init__(self, patches: Callable[[], Iterable[Patch]]) -> None:
        self._patches = patches
        self._saved: list[tuple[Any, str, Any]] = []
        self.depth = 0

    def enter(self) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        try:
            # all replacements are made before the first is installed: they wrap what they replace
            for owner, name, new in list(self._patches()):
                self._saved.append((owner, name, vars(owner).get(name, _MISSING)))
                setattr(owner, name, new)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        self.depth -= 1
        while self.depth == 0 and self._saved:
            owner, name, old = self._saved.pop()
            if old is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


def _core(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


def _megatron_patches() -> Iterator[Patch]:
    random = _core("tensor_parallel.random")
    states = {"_get_cuda_rng_state": get_state, "_set_cuda_rng_state": set_state}
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("megatron."):
            # other modules took these two with "from ... import"
            yield from ((module, name, new) for name, new in states.items() if name in vars(module))
    moe_utils, dispatcher = _core("transformer.moe.moe_utils"), _core("transformer.moe.token_dispatcher")
    # 0.16.1 names it without importing it where Transformer Engine is missing: NameError in the router; where it is there, it is a CUDA kernel
    yield moe_utils, "te_general_gemm", None
    yield from _tensor_list_patches()
    latent = _core("transformer.multi_latent_attention")
    if not isinstance(latent.TELinear, type):
        # 0.16.1 takes the placeholder for Transformer Engine itself: TypeError from isinstance() in every MLA layer
        yield latent, "HAVE_TE", False
    for module in (moe_utils, dispatcher):
        if hasattr(module, "maybe_move_tensor_to_cpu"):
            yield module, "maybe_move_tensor_to_cpu", split_sizes
    # a class attribute that megatron-core fills once: written back, or the null stream would outlive the layer
    alltoall = dispatcher.MoEAlltoAllTokenDispatcher
    yield alltoall, "cuda_dtoh_stream", getattr(alltoall, "cuda_dtoh_stream", None)
    # CPU and "CUDA" share one generator here, so its warning about that is always true
    # ("disabled" and not "level": a logger caches what its level allows, also after the level is back)
    yield logging.getLogger(random.__name__), "disabled", True


def _tensor_list_patches() -> Iterator[Patch]:
    """megatron-core's own norms and scalings of tensor lists, where an installed Transformer Engine or Apex has put its CUDA kernels."""
    utils = _core("utils")
    local = {
        "multi_tensor_applier": utils.local_multi_tensor_applier,
        "multi_tensor_scale_impl": utils.local_multi_tensor_scale,
        "l2_norm_impl": utils.local_multi_tensor_l2_norm,
    }
    for module in (
        _core("optimizer.optimizer"),
        _core("optimizer.clip_grads"),
        _core("distributed.fsdp.src.megatron_fsdp.mixed_precision"),
    ):
        yield from ((module, name, new) for name, new in local.items() if name in vars(module))


class _StandIn:
    """Makes `fused_adam` what megatron-core takes for Transformer Engine's FusedAdam, without pretending that Transformer Engine exists."""

    module = "transformer_engine.pytorch.optimizers"

    def __init__(self) -> None:
        self.adam: type | None = None
        self._replacement = _Replacement(self._patches)
        self._hidden: Any = _MISSING

    def _patches(self) -> Iterator[Patch]:
        optimizer, distributed, config = (
            _core("optimizer"),
            _core("optimizer.distrib_optimizer"),
            _core("optimizer.optimizer_config"),
        )
        for module in (optimizer, distributed):
            yield module, "Adam", self.adam
        yield optimizer, "USING_PYTORCH_OPTIMIZER", False
        yield distributed, "HAVE_APEX_OR_TE", True
        yield distributed, "USING_TE_OPTIMIZER", True
        for module in (optimizer, config):
            # asked for nothing but "is FusedAdam new enough"; without Transformer Engine it raises TypeError
            yield module, "is_te_min_version", lambda *args, **kwargs: True

    def enter(self, adam: type) -> None:
        if self.adam not in (None, adam):
            raise BadValue(
                f"cpu_device is active with {self.adam} as FusedAdam, expected the same class, got {adam}: leave the other one first"
            )
        self.adam = adam
        if self._replacement.depth == 0:
            # OptimizerConfig imports FusedAdam by this full name, and sys.modules is asked before any package is looked for
            self._hidden = sys.modules.get(self.module, _MISSING)
            stub = types.ModuleType(self.module)
            vars(stub)["FusedAdam"] = adam
            sys.modules[self.module] = stub
        self._replacement.enter()

    def leave(self) -> None:
        self._replacement.leave()
        if self._replacement.depth == 0:
            self.adam = None
            if self._hidden is _MISSING:
                sys.modules.pop(self.module, None)
            else:
                sys.modules[self.module] = self._hidden


class _Device:
    """The redirections and the process-wide torch state that megatron-core changes and does not give back."""

    def __init__(self) -> None:
        self.replacement = _Replacement(lambda: [*cuda_patches(), *_megatron_patches()])
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
    """Whether CUDA calls are redirected now."""
    return _DEVICE.replacement.depth > 0


@contextmanager
def cpu_device(*, fused_adam: type | None = None) -> Iterator[None]:
    """Inside, megatron-core trains on the CPU; on exit, also by an exception, everything touched is as before.

    Replacements are process-wide, so threads started inside see them too; nested and concurrent uses share one set, which goes with the last that leaves.
    fused_adam: what megatron-core uses as its Adam (FusedAdam's interface, `mpbridge.engines.optimizers.CpuFusedAdam`); without it torch's AdamW serves,
    which megatron-core's distributed optimizer cannot resume. Raises BadValue when another class is in use.
    """
    for name in _CORE:
        _core(name)
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
