"""A run's outlook on a machine: whether it is valid, whether it fits and how long a step takes. `check`, `memory`, `estimate` and `recommend` print parts of it."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mpbridge.common.errors import BadValue, MpbridgeError, Refused, naming
from mpbridge.common.facts import RunFacts
from mpbridge.common.machines import Machine
from mpbridge.common.tables import GIB
from mpbridge.planning.capability import Capability, can_run, refuse_unless_native
from mpbridge.planning.estimate.bounds import Bounds, FamilyBounds
from mpbridge.planning.estimate.candidates import moved
from mpbridge.planning.estimate.constants import Constants, constants
from mpbridge.planning.estimate.layouts import nearest, search
from mpbridge.planning.estimate.predict import Estimate, estimate, mean
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
    name: str = ""
    """'stage 2 (bf16_mixed)' of a schedule; "": the whole run."""
    stages: tuple[Outlook, ...] = ()
    """Of a `Schedule`; empty: one recipe."""
    using: Constants | None = None
    """Efficiencies of a machine that `calibrate` measured; None: the shipped ones."""

    @property
    def machine(self) -> Machine:
        """The machine in question."""
        return self.facts.machine  # type: ignore[no-any-return]

    @cached_property
    def violations(self) -> tuple[Violation, ...]:
        """The broken rules, errors first."""
        return broken(self.policy, self.facts)

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

    @property
    def fullest(self) -> Outlook:
        """The stage that decides whether the run fits. Raises Refused as `memory` does."""
        return self

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
            names = ", ".join(dict.fromkeys(violation.rule for violation in self.errors))
            found["valid"] = f"not valid: {len(self.errors)} error{'s' if len(self.errors) > 1 else ''} ({names})"
        if self.answer == "does not fit":
            sizes = (self.memory.needed, self.memory.band, self.machine.memory_bytes)
            need, off, have = (f"{size / GIB.size:.1f}" for size in sizes)
            found["fits"] = f"does not fit on {self.machine.name}{self._where}: {need} +- {off} GiB of {have}"
        return found

    @property
    def _where(self) -> str:
        return f" in {self.fullest.name}" if self.stages else ""

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
        tight = f"tight: it may run out of memory{self._where}"
        return f"yes: {tight if self.answer == 'tight' else 'valid, fits'}; {time}"

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
        full = self.fullest  # for a schedule it is asked what else would hold its fullest stage, and `gain` of all
        below = full.must_be_below if self.ok and self.answer == "fits" else None
        with contextlib.suppress(MpbridgeError):
            asked = full.policy, full.facts, self.machine
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
        """The same in another layout, in the facts of the `fullest`."""
        return dataclasses.replace(self, facts=facts)


_FITS = ("fits", "tight", "does not fit")
_RUNS = ("native", "emulated", "no")


@dataclass(frozen=True, kw_only=True)
class Schedule(Outlook):
    """Answers about a run with a schedule of recipes, of which each stage has an outlook of its own: the run is as valid, as capable and as full as the
    worst of them, and its step is their mean. `policy` and `facts` are the first stage's."""

    shares: tuple[float, ...] | None = None
    """Each stage's share of the steps; None: not known."""
    changes: tuple[Violation, ...] = ()
    """What is wrong between stages."""

    @cached_property
    def violations(self) -> tuple[Violation, ...]:
        """The broken rules of every stage, errors first; those that not all of them break name theirs."""
        found = list(self.changes)
        for violation in dict.fromkeys(violation for stage in self.stages for violation in stage.violations):
            whose = [stage for stage in self.stages if violation in stage.violations]
            names = "" if len(whose) == len(self.stages) else f"{' and '.join(stage.name for stage in whose)}: "
            found.append(dataclasses.replace(violation, found=f"{names}{violation.found}"))
        return tuple(sorted(found, key=lambda violation: violation.severity != "error"))

    @cached_property
    def misfits(self) -> tuple[Misfit, ...]:
        """Sizes that do not suit a stage's recipe."""
        return tuple(dict.fromkeys(misfit for stage in self.stages for misfit in stage.misfits))

    @cached_property
    def capability(self) -> Capability:
        """The least of any stage, which it names if others differ."""
        least = max(self.stages, key=lambda stage: (_RUNS.index(stage.capability.how), not stage.capability.proven))
        if all(stage.capability == least.capability for stage in self.stages):
            return least.capability
        return dataclasses.replace(least.capability, reason=f"{least.name}: {least.capability.reason}")

    @cached_property
    def fullest(self) -> Outlook:
        """The stage whose answer is worst, and of these the one that needs most."""
        have = self.machine.memory_bytes
        self._of_each("memory")  # raises, with the stage's name
        return max(self.stages, key=lambda stage: (_FITS.index(verdict(stage.memory, have)), stage.memory.needed))

    @cached_property
    def memory(self) -> Memory:
        """That of the fullest stage. Raises Refused as a stage's does."""
        return self.fullest.memory

    @cached_property
    def may_fit(self) -> bool:
        """False where a part of a stage's answer is enough to know that it does not fit."""
        return all(stage.may_fit for stage in self.stages)

    @cached_property
    def fit(self) -> Fit | None:
        """That of the fullest stage, without the ways that would be another recipe: single fields cannot change a list of stages."""
        if (found := self.fullest.fit) is None:
            return None
        ways = tuple(way for way in found.ways if not way.startswith("mixed_precision."))
        return dataclasses.replace(found, ways=ways)

    @cached_property
    def time(self) -> Estimate:
        """The mean step over the run; the slowest stage's where their shares are not known. Raises as a stage's does."""
        times = self._of_each("time")
        if self.shares is not None:
            found, which = mean(list(zip(self.shares, times, strict=True))), "the mean over the stages"
        else:
            found = max(times, key=lambda one: one.seconds)
            which = "the slowest stage, since without train.train_iters their shares are not known"
        return dataclasses.replace(found, because=f"{which}; {found.because}")

    @cached_property
    def undivided(self) -> str:
        """What does not divide in any stage, as text."""
        return "; ".join(dict.fromkeys(stage.undivided for stage in self.stages if stage.undivided))

    def _of_each(self, part: str) -> list[Any]:
        """That part of every stage. Raises what the first without it does, with its name unless all say the same."""
        found: list[Any] = []
        faults: dict[str, MpbridgeError] = {}
        for stage in self.stages:
            try:
                found.append(getattr(stage, part))
            except (Refused, BadValue) as error:
                faults[stage.name] = error
        if faults:
            name, first = next(iter(faults.items()))
            alike = [str(error) for error in faults.values()] == [str(first)] * len(self.stages)
            with naming("" if alike else name):
                raise first
        return found

    def on(self, facts: RunFacts) -> Outlook:
        """The same stages in another layout, in the facts of the `fullest`."""
        stages = tuple(stage.on(moved(stage.facts, self.fullest.facts, facts)) for stage in self.stages)
        return dataclasses.replace(self, facts=stages[0].facts, stages=stages)
