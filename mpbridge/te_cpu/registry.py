"""The table of kernels: every function of `transformer_engine_torch` implemented here, by the name that Transformer Engine calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

KernelFunction = TypeVar("KernelFunction", bound=Callable[..., Any])

KERNELS: dict[str, Callable[..., Any]] = {}
"""Name in `transformer_engine_torch` (with a dot: in a submodule) -> function."""


def kernel(function: KernelFunction) -> KernelFunction:
    """Registers a function under its own name."""
    KERNELS[function.__name__] = function
    return function


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
