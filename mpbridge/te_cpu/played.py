"""What is being played, the machine and the release whose rules apply; and the table of kernels, which plays `transformer_engine_torch`."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypeVar

import torch

from mpbridge.common.errors import Refused
from mpbridge.common.machines import Arch, Machine
from mpbridge.numerics.scales import Rules, rules_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A machine and a Transformer Engine release."""

    machine: Machine
    release: tuple[int, ...]

    @property
    def text(self) -> str:
        """The release, as '2.20.2'."""
        return ".".join(map(str, self.release))

    @property
    def capability(self) -> Arch:
        """Compute capability of the machine."""
        assert self.machine.arch is not None  # a CPU cannot be played
        return self.machine.arch

    @property
    def any_layout(self) -> bool:
        """Whether FP8 GEMMs take operands in any layout, so that no transposes are stored. Hopper, Ada and sm_12x need transposes.

        Source: `nvte_is_non_tn_fp8_gemm_supported` in Transformer Engine's common/transformer_engine.cpp.
        """
        return (10, 0) <= self.capability < (12, 0) or self.capability >= (13, 0)

    @property
    def blocks_become_mxfp8(self) -> bool:
        """Whether blockwise operands are multiplied as MXFP8 (csrc/extensions/gemm.cpp): their scales must be powers of two."""
        return self.capability >= (10, 0)

    @property
    def rules(self) -> Rules:
        """The release's rounding rules."""
        return rules_for((self.release[0], self.release[1]))


_now: list[Played] = []


def now() -> Played:
    """The machine and release being played; raises Refused outside of `transformer_engine_on_cpu`."""
    if not _now:
        raise Refused("a kernel of Transformer Engine was called outside of mpbridge.transformer_engine_on_cpu()")
    return _now[-1]


@contextmanager
def playing(machine: Machine, release: tuple[int, ...]) -> Iterator[Played]:
    """In the block, this machine and release are played."""
    _now.append(Played(machine=machine, release=release))
    try:
        yield _now[-1]
    finally:
        _now.pop()


# --- every function of `transformer_engine_torch` implemented here, by the name that Transformer Engine calls ---------------------------------
KernelFunction = TypeVar("KernelFunction", bound=Callable[..., Any])

KERNELS: dict[str, Callable[..., Any]] = {}
"""Name in `transformer_engine_torch` (with a dot: in a submodule) -> function."""


def kernel(function: KernelFunction) -> KernelFunction:
    """Registers a function under its own name; lists of tensors are checked as the extension's binding checks them."""
    listed = "tensor_lists" in signature(function).parameters
    KERNELS[function.__name__] = _lists_checked(function) if listed else function
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
        order = next((order for since, order in reversed(rows) if since <= now().release), rows[0][1])
        return function(**dict(zip(order, given, strict=False)), **named)

    call.__name__, call.__doc__ = function.__name__, function.__doc__
    return call
