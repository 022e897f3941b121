"""What is being played: the machine, and the release whose rules apply."""

from __future__ import annotations

from dataclasses import dataclass

from mpbridge.common.errors import Refused
from mpbridge.common.machines import Arch, Machine
from mpbridge.numerics.scales import Rules, rules_for

LibraryRelease = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A machine and a Transformer Engine release."""

    machine: Machine
    release: LibraryRelease

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


def enter(played: Played) -> None:
    """Starts playing."""
    _now.append(played)


def leave() -> None:
    """Leaves what was entered last."""
    _now.pop()
