"""The table of kernels: every function of `transformer_engine_torch` implemented here, by the name that Transformer Engine calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar

import torch

KernelFunction = TypeVar("KernelFunction", bound=Callable[..., Any])

KERNELS: dict[str, Callable[..., Any]] = {}
"""Name in `transformer_engine_torch` (with a dot: in a submodule) -> function."""


def kernel(function: KernelFunction) -> KernelFunction:
    """Registers a function under its own name; lists of tensors are checked as the extension's binding checks them."""
    KERNELS[function.__name__] = (
        _lists_checked(function) if "tensor_lists" in signature(function).parameters else function
    )
    return function


def _lists_checked(function: Callable[..., Any]) -> Callable[..., Any]:
    order = list(signature(function).parameters).index("tensor_lists")

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        lists = named["tensor_lists"] if "tensor_lists" in named else given[order]
        if lists is None or any(not isinstance(one, torch.Tensor) for tensors in lists for one in tensors):
            raise TypeError(
                f"{function.__name__}(): incompatible function arguments: tensor_lists holds something that is no tensor"
            )
        return function(*given, **named)

    return call


def argument_lists(function: Callable[..., Any], **names: tuple[str, ...]) -> Callable[..., Any]:
    """A dispatcher over argument lists that changed between releases: the release's own list is bound to the newest names.

    names: 'since_2_18' -> the arguments in that release's order; the latest row that is not newer than the played release is used.
    """
    rows = sorted((tuple(map(int, key.removeprefix("since_").split("_"))), order) for key, order in names.items())

    def call(*given: Any, **named: Any) -> Any:
        from mpbridge.te_cpu.played import now

        order = next((order for since, order in reversed(rows) if since <= now().release), rows[0][1])
        return function(**dict(zip(order, given, strict=False)), **named)

    call.__name__, call.__doc__ = function.__name__, function.__doc__
    return call
