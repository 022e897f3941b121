"""A run's outlook on a machine: whether it is valid, whether it fits and how long a step takes. `check`, `memory`, `estimate` and `recommend` print parts of it."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from functools import cached_property

from mpbridge.common.errors import MpbridgeError, Refused
from mpbridge.common.facts import RunFacts
from mpbridge.common.machines import Machine
from mpbridge.common.tables import GIB
from mpbridge.planning.capability import Capability, can_run, refuse_unless_native
from mpbridge.planning.estimate.bounds import Bounds, FamilyBounds
from mpbridge.planning.estimate.constants import Constants, constants
from mpbridge.planning.estimate.layouts import nearest, search
from mpbridge.planning.estimate.predict import Estimate, estimate
from mpbridge.planning.memory.by_role import Fit, Memory, fit, memory, verdict
from mpbridge.planning.rules.base import Violation
from mpbridge.planning.rules.gemm_shapes import Misfit, lint
from mpbridge.planning.rules.table import broken
from mpbridge.precision.policy import PrecisionPolicy

_DIVIDE = {"layers-do-not-divide", "sizes-do-not-divide"}
"""Rules whose violation leaves a run without bytes, time or ranks."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Answers about a run on the machine of its facts, each computed once, on first use."""

    policy: PrecisionPolicy
    facts: RunFacts
    """With machine and versions."""
    later: tuple[tuple[str, PrecisionPolicy], ...] = ()
    """(name, policy) of the run's recipes after the first."""
    using: Constants | None = None
    """Efficiencies of a machine that `calibrate` measured; None: the shipped ones."""

    @property
    def machine(self) -> Machine:
        """The machine in question."""
        return self.facts.machine  # type: ignore[no-any-return]

    @cached_property
    def violations(self) -> tuple[Violation, ...]:
        """The broken rules of every recipe, errors first; those of later recipes name their stage."""
        found = list(broken(self.policy, self.facts))
        for stage, (name, policy) in enumerate(self.later, start=2):
            seen = {violation.rule for violation in found}
            found += [
                dataclasses.replace(violation, found=f"stage {stage} ({name}): {violation.found}")
                for violation in broken(policy, self.facts)
                if violation.rule not in seen
            ]
        return tuple(sorted(found, key=lambda violation: violation.severity != "error"))

    @cached_property
    def errors(self) -> tuple[Violation, ...]:
        """The violations that forbid the run."""
        return tuple(violation for violation in self.violations if violation.severity == "error")

    @cached_property
    def misfits(self) -> tuple[Misfit, ...]:
        """Sizes that do not suit the recipe."""
        return tuple(lint(self.policy, self.facts))

    @cached_property
    def capability(self) -> Capability:
        """Whether the machine runs the recipe natively, emulated or not at all."""
        by = "emulation" if self.facts.realization == "emulated" else "transformer_engine"
        return can_run(self.policy, self.machine, self.facts.versions, quantized_by=by)  # type: ignore[arg-type]

    @cached_property
    def memory(self) -> Memory:
        """Bytes of the fullest rank. Raises Refused if layers or sizes cannot be divided as requested."""
        if self.undivided:
            raise Refused(self.undivided)
        return memory(self.policy, self.facts)

    @cached_property
    def answer(self) -> str:
        """ "fits", "tight" or "does not fit", of the fullest rank; "" if `no_answer` says why it is not known."""
        return "" if self.no_answer else verdict(self.memory, self.machine.memory_bytes)

    @cached_property
    def may_fit(self) -> bool:
        """False where a part of the answer, which costs far less, is enough to know that it does not fit."""
        with contextlib.suppress(MpbridgeError):
            bounds = FamilyBounds(Bounds(self.policy, self.machine, self.using or constants()), (self.facts,))
            return bounds.verdict(self.facts, self.machine.memory_bytes) != "does not fit"
        return True

    @cached_property
    def fit(self) -> Fit | None:
        """Whether the fullest rank fits, and what would make it fit; None: the machine is not a GPU. Raises Refused as `memory` does."""
        return fit(self.policy, self.facts, self.machine, self.memory) if self.machine.gpu else None

    @cached_property
    def time(self) -> Estimate:
        """The predicted step. Raises Refused if the machine does not run the recipe natively or sizes do not divide, BadValue if the run cannot be priced."""
        if self.machine.gpu:
            refuse_unless_native(self.policy, self.machine, self.facts.versions)
        if self.undivided and self.machine.peak:
            raise Refused(self.undivided)
        return estimate(self.policy, self.facts, None, self.using)

    @cached_property
    def undivided(self) -> str:
        """What does not divide, as text: `check` answers no, and every verb that shows a part of it refuses; "" if everything divides."""
        return "; ".join(str(one).removeprefix("error ") for one in broken(self.policy, self.facts, _DIVIDE))

    @cached_property
    def no_answer(self) -> str:
        """Why it is not known whether it fits; "" if it is."""
        if not self.machine.gpu:
            return f"{self.machine.name} is not a GPU (--target names one)"
        if not self.machine.memory_bytes:
            return f"the memory of {self.machine.label} is unknown"
        try:
            _ = self.memory
        except MpbridgeError as error:
            return "layers or sizes do not divide" if self.undivided else error.line
        return ""

    @cached_property
    def no_time(self) -> str:
        """Why there is no predicted time; "" if there is one."""
        if not self.machine.peak:
            return f"no rates are known of {self.machine.name} (--target, or a --machine-file that mpbridge calibrate wrote)"
        try:
            _ = self.time
        except MpbridgeError as error:
            return "layers or sizes do not divide" if self.undivided else error.line
        return ""

    @cached_property
    def objections(self) -> dict[str, str]:
        """ "valid" and "fits" -> why not; empty: nothing that is known refuses the run."""
        found = {}
        if self.errors:
            names = ", ".join(violation.rule for violation in self.errors)
            found["valid"] = f"not valid: {len(self.errors)} error{'s' if len(self.errors) > 1 else ''} ({names})"
        if self.answer == "does not fit":
            sizes = (self.memory.needed, self.memory.band, self.machine.memory_bytes)
            need, off, have = (f"{size / GIB.size:.1f}" for size in sizes)
            found["fits"] = f"does not fit on {self.machine.name}: {need} +- {off} GiB of {have}"
        return found

    @property
    def ok(self) -> bool:
        """Whether nothing refuses the run."""
        return not self.objections

    @property
    def verdict(self) -> str:
        """The answer in a line: yes, no or not decided, and why."""
        if self.objections:
            return f"no: {'; '.join(self.objections.values())}"
        time = f"time not decided: {self.no_time}" if self.no_time else f"about {self.time.seconds:.3g} s a step"
        if self.no_answer:
            return f"valid; whether it fits is not decided: {self.no_answer}" + ("" if self.no_time else f"; {time}")
        return f"yes: {'tight: it may run out of memory' if self.answer == 'tight' else 'valid, fits'}; {time}"

    @property
    def parts(self) -> dict[str, int]:
        """What decides whether it fits: bytes of states, activations and the rest, largest first."""
        mine = self.memory
        found = {"states": mine.states, "activations": mine.activations}
        found["the rest"] = mine.needed - sum(found.values())
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def gain(self, other: Outlook) -> str:
        """What `other` gains over this run, in words; '' if nothing that exceeds the error band."""
        fast = self.ok and self.answer == "fits"
        if (fast and (other.no_time or other.time.seconds >= self.must_be_below)) or not other.may_fit:
            return ""
        if other.answer not in (("fits",) if self.ok else ("fits", "tight")) or other.errors:
            return ""
        if fast:
            return f"{self.time.seconds / other.time.seconds:.2f} times as fast"
        if not self.errors:  # what may not fit either has to hold less
            return "" if other.answer == "tight" and other.memory.needed >= self.memory.needed else other.answer
        return f"valid, {other.answer}"

    @cached_property
    def must_be_below(self) -> float:
        """Seconds of a step below which another one is faster by more than the error band."""
        return 0.0 if self.no_time else self.time.seconds / (1 + self.time.band)

    def layouts(self, most: int, *, stated: bool = False) -> list[Outlook]:
        """This run in up to `most` other layouts that gain something: the fastest and, if none of them fits, the nearest that does.

        stated: the author set whether the optimizer is distributed. Empty if the memory is unknown, or a rule forbids every layout."""
        if not self.answer or not self.capability.native:
            return []
        below = self.must_be_below if self.ok and self.answer == "fits" else None
        with contextlib.suppress(MpbridgeError):
            asked = self.policy, self.facts, self.machine
            near = search(*asked, most=most, using=self.using, stated=stated, below=below)
            # what fits is worth more than what may fit
            wanted = sorted(near, key=lambda layout: layout.answer)
            found = [self.on(layout.run) for layout in wanted if layout.answer == "fits" or not self.ok]
            if not self.ok and not (wanted and wanted[0].answer == "fits"):
                other = nearest(*asked, stated=stated)
                found = [*([self.on(other)] if other is not None else []), *found]
            return [one for one in found if self.gain(one)][:most]
        return []

    def on(self, facts: RunFacts) -> Outlook:
        """The same recipes in another layout."""
        return dataclasses.replace(self, facts=facts)
