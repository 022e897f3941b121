"""A schedule of recipes: which recipe each step of one run is trained in, with the switch at a step boundary. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args

from mpbridge.common.errors import BadValue, Contradiction

MarkUnit = Literal["percent", "steps", "tokens"]

_MULTIPLE = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_MARK = re.compile(
    r"^(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(?P<multiple>[kmbt]?)\s*(?P<unit>%|percent|steps?|tokens?)?$",
    re.IGNORECASE,
)
_FORMS = "'90%', a number of steps (1000 or '1000 steps'), or tokens ('2B tokens')"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A place in a run, as its author wrote it."""

    amount: float
    unit: MarkUnit

    @classmethod
    def parse(cls, text: object) -> Mark:
        """The mark that '90%', 1000, '1000 steps', '2B tokens' or {tokens: 2e9} stands for; raises BadValue."""
        if isinstance(text, Mapping) and len(text) == 1:
            ((unit, amount),) = text.items()
            return cls.parse(f"{amount} {unit}")
        found = None if isinstance(text, bool) else _MARK.match(str(text).strip())
        if found is None:
            raise BadValue(f"until: {text!r} is not a valid stage end (expected {_FORMS})")
        unit = (found["unit"] or "steps").lower()
        amount = float(found["number"]) * _MULTIPLE[found["multiple"].lower()]
        kind: MarkUnit = "percent" if unit in ("%", "percent") else "tokens" if unit.startswith("token") else "steps"
        if kind == "percent" and not 0 < amount < 100:
            raise BadValue(f"until: {text!r} is not between 0% and 100%")
        if kind == "steps" and (amount < 1 or amount != int(amount)):
            raise BadValue(f"until: {text!r} is not a whole number of steps (expected at least 1)")
        return cls(amount=amount, unit=kind)

    def step(self, *, steps: int, tokens_per_step: int) -> int:
        """Number of steps done when this place is reached: rounded to the nearest for percent, up to the step that reaches it for tokens."""
        if self.unit == "percent":
            return round(steps * self.amount / 100)
        if self.unit == "tokens":
            return -int(-self.amount // tokens_per_step)
        return int(self.amount)


class HasEnd(Protocol):
    """A stage, as config.stages has them."""

    @property
    def recipe(self) -> str:
        """The recipe's name."""

    @property
    def until(self) -> Any:
        """Where it ends, as its author wrote it; None: with the run."""


S = TypeVar("S", bound=HasEnd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span(Generic[S]):
    """Steps start + 1 ... stop of a run, all in one recipe."""

    index: int
    start: int
    """Steps done when it begins."""
    stop: int
    """Steps done when it ends."""
    stage: S

    def holds(self, done: int) -> bool:
        """Whether the step that follows `done` finished ones is in this span."""
        return self.start <= done < self.stop


def spans(stages: Sequence[S], *, steps: int, tokens_per_step: int) -> tuple[Span[S], ...]:
    """The stages as step ranges that cover a run of `steps`; raises Contradiction for a stage of no step, or one that ends after the run."""
    found: list[Span[S]] = []
    faults: list[str] = []
    start = 0
    for index, stage in enumerate(stages):
        stop = steps
        try:
            if stage.until is not None:
                stop = Mark.parse(stage.until).step(steps=steps, tokens_per_step=tokens_per_step)
        except BadValue as error:
            faults.append(f"stage {index + 1} ({stage.recipe}): {error}")
            continue
        ends = f"{stage.recipe}{'' if stage.until is None else f' until {stage.until}'} ends at step {stop}"
        if stop <= start and steps:
            faults.append(f"{ends}, but it begins after step {start}: give it a later `until`")
        if stop > steps:
            faults.append(f"{ends}, after the run's last step {steps}: end it earlier, or train longer")
        found.append(Span(index=index, start=start, stop=stop, stage=stage))
        start = max(start, stop)
    if faults:
        raise Contradiction(faults, subject="the schedule of recipes does not fit the run")
    return tuple(found)


def shares(stages: Sequence[HasEnd], *, steps: int, tokens_per_step: int) -> tuple[float, ...] | None:
    """Each stage's share of the run's steps. None: not known, as where a stage ends at a step of a run whose length is not set (steps=0). Raises Contradiction
    as `spans` does, and BadValue without a length for ends that no length puts in order."""
    if steps:
        return tuple(
            (span.stop - span.start) / steps for span in spans(stages, steps=steps, tokens_per_step=tokens_per_step)
        )
    marks = [Mark.parse(stage.until) for stage in stages if stage.until is not None]
    for unit in get_args(MarkUnit):
        alike = [mark.amount for mark in marks if mark.unit == unit]
        if alike != sorted(set(alike)):
            order = ", ".join(f"{stage.recipe} until {stage.until}" for stage in stages if stage.until is not None)
            raise BadValue(f"{order}: give each stage a later `until` than the one before it")
    if any(mark.unit != "percent" for mark in marks):
        return None
    ends = [0.0, *(mark.amount / 100 for mark in marks), 1.0]
    return tuple(stop - start for start, stop in itertools.pairwise(ends))
