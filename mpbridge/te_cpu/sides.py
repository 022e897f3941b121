"""Copies between the CPU and a simulated GPU, whose memory is the same: code that keeps `weight.cpu()` must not see the weight change.

A tensor that `.cpu()`, `.to("cpu")` or pinning made is marked in its storage, and lies on the CPU with its views and what is made like it; every other one counts as the GPU's. A
`torch.device` says nothing, since that of every tensor here is the CPU's.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from mpbridge.backend.devices.redirect import FACTORIES, PLAIN, is_pinned, names_cuda
from mpbridge.common.upstream import Patch

_MARK = "_mpbridge_host"


def _strided(tensor: Any) -> bool:
    """Whether the tensor has memory of its own to mark."""
    return type(tensor) in PLAIN and tensor.layout is torch.strided and not is_functorch_wrapped_tensor(tensor)


def on_host(tensor: Any) -> bool:
    """Whether the tensor is known to lie on the CPU."""
    return _strided(tensor) and (hasattr(tensor.untyped_storage(), _MARK) or is_pinned(tensor))


def _to_host(tensor: Any, made: Any) -> Any:
    """`made` from `tensor` by a move to the CPU: a copy, unless both are there."""
    if not _strided(made) or made.is_meta or (made is tensor and on_host(tensor)):
        return made
    if _strided(tensor) and made.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        made = made.clone()
    setattr(made.untyped_storage(), _MARK, True)
    return made


def _to_device(made: Any) -> Any:
    """`made` after a move to the GPU: a copy if it is known to lie on the CPU, or if elements share memory, which they would not there."""
    if on_host(made):
        return made.clone()
    overlaps = _strided(made) and any(
        step == 0 and size > 1 for step, size in zip(made.stride(), made.shape, strict=True)
    )
    return made.clone(memory_format=torch.contiguous_format) if overlaps else made


def _cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: _to_device(original(self, *args, **kwargs))


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        to = args[0] if args else kwargs.get("device", kwargs.get("other"))
        if isinstance(to, torch.Tensor):
            return _to_host(self, made) if on_host(to) else _to_device(made)
        if to == "cpu" and isinstance(to, str):
            return _to_host(self, made)
        if names_cuda(to) or (isinstance(to, torch.device) and to.type == "cpu"):
            return _to_device(made)
        return made

    return to


def _module(original: Callable[..., Any], to_device: bool | None = None) -> Callable[..., Any]:
    """Moves a module's tensors as its `to` (to_device: None) or `cuda` would, each keeping its identity."""

    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        to = args[0] if args else kwargs.get("device")
        host = isinstance(to, str) and to == "cpu"
        if to_device or host or names_cuda(to):
            for one in (*torch.nn.Module.parameters(made), *torch.nn.Module.buffers(made)):
                data = one.data
                moved = _to_host(data, data) if host and not to_device else _to_device(data)
                if moved is not data:
                    one.data = moved
        return made

    return move


def _like(original: Callable[..., Any]) -> Callable[..., Any]:
    def like(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        return _to_host(self, made) if on_host(self) and kwargs.get("device") is None else made

    return like


def with_copies(patches: Iterable[Patch]) -> Iterator[Patch]:
    """The replacements of a device layer, with those moves that copy."""
    moves: dict[tuple[Any, str], Callable[..., Any]] = {
        (torch.Tensor, "to"): _to,
        (torch.Tensor, "cuda"): _cuda,
        (torch.nn.Module, "to"): _module,
        (torch.nn.Module, "cuda"): functools.partial(_module, to_device=True),
    }
    moves |= {(torch, name): _like for name in FACTORIES if name.endswith("_like")}
    for owner, name, new in patches:
        move = moves.get((owner, name))
        yield owner, name, new if move is None else move(new)
    cpu = torch.Tensor.cpu
    yield torch.Tensor, "cpu", lambda tensor, *args, **kwargs: _to_host(tensor, cpu(tensor, *args, **kwargs))
    yield torch.Tensor, "is_cuda", property(lambda tensor: tensor.device.type != "meta" and not on_host(tensor))
