"""A suspect, the input of every cause function, and operands with large losses."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from mpbridge.observe.diagnose.evidence import Evidence
from mpbridge.observe.diagnose.signals import Odd, Onset


@dataclass(slots=True, kw_only=True)
class Suspect:
    """A cause, and the evidence for it."""

    cause: str
    sentence: str
    step: int
    score: float
    evidence: list[str] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Symptoms:
    """The input of all cause functions."""

    run: Evidence
    onsets: list[Onset]
    odd: list[Odd]

    def onset(self, number: str) -> Onset | None:
        """The first step out of line of one number."""
        return next((one for one in self.onsets if one.number == number), None)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The run's events of a kind."""
        return [event for event in self.run.events if event["event"] == kind]

    def near(self, step: int) -> bool:
        """Whether something of the whole model goes wrong at that step or within two measurements after it."""
        return any(step - 2 <= one.step <= step + 2 * self.every for one in self.onsets)

    @property
    def tokens_counted(self) -> bool:
        """Whether the run counted its tokens: if so, a jump of the loss on ordinary tokens is not due to the data."""
        return bool(self.events("tokens")) or any("nats_per_token" in one.facts for one in self.run.measured)

    def unlike(self, onset: Onset) -> list[dict[str, Any]]:
        """The run's events about unusual tokens at that step and the one before: a jump there is due to the data, whatever else happened shortly before."""
        return [event for event in self.events("tokens") if onset.step - 1 <= event["iteration"] <= onset.step]

    def jump_after(self, step: int, *, within: int) -> Onset | None:
        """The first onset within so many steps after a step that is not explained by its own tokens."""
        return next((one for one in self.onsets if step < one.step <= step + within and not self.unlike(one)), None)

    @property
    def every(self) -> int:
        """Steps between two measurements."""
        steps = [one.step for one in self.run.measured]
        return max(1, min((b - a for a, b in itertools.pairwise(steps)), default=1), 5)


def flushed_operands(case: Symptoms, *, after: int = -1) -> list[str]:
    """Operands with large losses, as sentences."""
    found = []
    for name, points in case.run.operands().items():
        for step, row in points:
            lost, clipped = row.get("flushed") or 0.0, row.get("saturated") or 0.0
            wide = row["format"] == "e2m1"
            if step > after and (lost > (0.5 if wide else 0.25) or clipped > (0.3 if wide else 0.02)):
                found.append(f"step {step}: {name}: {lost:.0%} flushed to zero, {clipped:.1%} saturated")
                break
    return found
