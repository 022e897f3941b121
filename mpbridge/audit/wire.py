"""The dtypes on the wire, seen at the collective calls themselves while a step runs."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from mpbridge.audit.stored import storage
from mpbridge.megatron.cpu import is_core

REDUCTIONS = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single", "reduce_scatter", "_reduce_scatter_base")
GATHERS = ("all_gather_into_tensor", "all_gather_single", "all_gather", "_all_gather_base")
"""torch 2.13 calls the second of each pair from within the first; older releases know only the first."""
_SMALL = 32
"""Below this many elements a floating-point all-reduce carries a norm, a loss or a flag, not gradients."""

Seen = Counter[tuple[str, str]]
"""('gradients' | 'parameters', dtype) -> elements sent by this rank."""


_aside = 0


@contextmanager
def unobserved() -> Iterator[None]:
    """What is sent inside belongs to no step (a checkpoint's tables and bytes): it is not counted."""
    global _aside
    _aside += 1
    try:
        yield
    finally:
        _aside -= 1


def _first_tensor(values: tuple[Any, ...]) -> torch.Tensor | None:
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return value[0]
    return None


def _payload(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The tensor that this rank hands in: an all-reduce works in place, the others take (output, input)."""
    if name == "all_reduce":
        return _first_tensor((*args[:1], kwargs.get("tensor")))
    named = next((kwargs[key] for key in ("input_tensor", "input", "input_list", "tensor") if key in kwargs), None)
    return _first_tensor((named, *args[1:2], *args[:1]))


def _data_parallel(group: Any) -> bool:
    """Whether `group` may be one of megatron-core's data-parallel groups: none of those that carry activations (tensor, pipeline, context, expert).

    True where there is no megatron-core state to ask, and for groups that it does not know (a wrapper's own).
    """
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return True
    return all(
        group is not other for other in (get(check_initialized=False) for get in _activation_groups(parallel_state))
    )


def _activation_groups(state: Any) -> tuple[Callable[..., Any], ...]:
    return (
        state.get_tensor_model_parallel_group,
        state.get_pipeline_model_parallel_group,
        state.get_context_parallel_group,
        state.get_expert_model_parallel_group,
        state.get_expert_tensor_parallel_group,
        state.get_expert_tensor_and_model_parallel_group,
    )


def _spy(name: str, original: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    kind = "gradients" if name in REDUCTIONS else "parameters"

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensor = None if _aside else _payload(name, args, kwargs)
        if (
            tensor is not None
            and tensor.numel() >= _SMALL
            and _carries_weights(tensor, kind)
            and _data_parallel(kwargs.get("group", _group(args)))
        ):
            seen[kind, storage(tensor)] += tensor.numel()
        with unobserved():  # one of torch's names calls another
            return original(*args, **kwargs)

    return call


def _group(args: tuple[Any, ...]) -> Any:
    return next((arg for arg in args if isinstance(arg, dist.ProcessGroup)), None)


def _carries_weights(tensor: torch.Tensor, kind: str) -> bool:
    # quantized weights travel as bytes; integers in a reduction are token counts, and FP64 is never a gradient's dtype
    return tensor.is_floating_point() or (kind == "parameters" and tensor.dtype is torch.uint8)


def _owners(function: Any, name: str) -> Iterator[tuple[Any, str]]:
    """Every place that calls `function` by: torch.distributed's own names, and aliases that megatron-core took at import."""
    yield dist, name
    yield dist.distributed_c10d, name
    for module in list(sys.modules.values()):
        if is_core(module):
            yield from ((module, alias) for alias, value in list(vars(module).items()) if value is function)


@contextmanager
def observed(seen: Seen | None = None) -> Iterator[Seen]:
    """Counts, per kind and dtype, the elements that gradient reductions and parameter gathers of data-parallel groups carry inside the context.

    Calls are counted, not changed; everything replaced is put back. At one process megatron-core still calls its collectives, FSDP2 does not.
    """
    seen = Counter() if seen is None else seen
    with ExitStack() as undo:
        for name in (*REDUCTIONS, *GATHERS):
            original = getattr(dist, name, None)
            if original is None:
                continue
            spy = _spy(name, original, seen)
            for owner, alias in _owners(original, name):
                if getattr(owner, alias, None) is original:
                    setattr(owner, alias, spy)
                    undo.callback(setattr, owner, alias, original)
        yield seen
