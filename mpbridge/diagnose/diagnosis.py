"""`diagnose(folder)`: the first step and tensors out of line, what changed before, and which causes fit, each with its evidence."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mpbridge.diagnose.against import differences
from mpbridge.diagnose.causes import suspects
from mpbridge.diagnose.evidence import Evidence, gather
from mpbridge.diagnose.signals import Odd, Onset, odd_tensors, onsets
from mpbridge.diagnose.suspects import Case, Suspect


@dataclass(slots=True, kw_only=True)
class Diagnosis:
    """What a run's files tell."""

    run: Evidence
    onsets: list[Onset]
    odd: list[Odd]
    suspects: list[Suspect]
    """The likeliest first; empty for a run without anything out of line."""
    changes: list[str]
    """What changed before the first step out of line, or at all: recipe, resume, rate, loss scale, failed audits."""
    against: list[str] = field(default_factory=list)
    """How the run differs from the other one."""

    def _repr_html_(self) -> str:
        """For notebooks: the suspects with their evidence."""
        from mpbridge.cells import table

        rows = [
            (one.cause, one.step, one.sentence, "; ".join(one.evidence), "; ".join(one.advice)) for one in self.suspects
        ]
        columns = ("cause", "step", "what", "seen", "try")
        return table(self.verdict, columns, rows, tones=["bad"], note="; ".join(self.run.gaps))

    @property
    def healthy(self) -> bool:
        """Nothing is out of line."""
        return not self.suspects and not self.onsets

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.suspects:
            first = self.suspects[0]
            return f"{first.cause}: {first.sentence} (from step {first.step})"
        if self.onsets:
            return f"step {self.onsets[0].step}: {self.onsets[0].what}; {self.unexplained}"
        return "nothing is out of line"

    @property
    def unexplained(self) -> str:
        """What was looked at without finding a cause: a jump of a healthy run accuses nothing."""
        if not self.run.measured:
            return "nothing in the files explains it"
        case = Case(run=self.run, onsets=self.onsets, odd=self.odd)
        tokens = ", and its tokens are like those before" if case.tokens_counted else ""
        return f"no cause in precision is seen{tokens}: the optimization itself may do that (a longer warm-up or a lower optimizer.lr makes it rarer)"

    def as_data(self) -> dict[str, Any]:
        """In JSON types."""
        return {
            "run": str(self.run.folder),
            "recipe": self.run.recipe,
            "steps": len(self.run.curves.rows),
            "verdict": self.verdict,
            "onsets": [asdict(one) for one in self.onsets],
            "tensors": [str(one) for one in self.odd[:20]],
            "suspects": [asdict(one) for one in self.suspects],
            "changes": self.changes,
            "against": self.against,
            "cannot_tell": self.run.gaps,
        }


def diagnose(folder: Path, against: Path | None = None) -> Diagnosis:
    """Reads the run in `folder`, beside the healthy run in `against` where one is given. Raises BadValue where there is no run to read."""
    run = gather(folder)
    found, odd = onsets(run), odd_tensors(run)
    named = suspects(Case(run=run, onsets=found, odd=odd))
    first = min([one.step for one in found] + [one.step for one in named[:1]], default=None)
    return Diagnosis(
        run=run,
        onsets=found,
        odd=[one for one in odd if first is not None],
        suspects=named,
        changes=_changes(run, first),
        against=differences(run, gather(against)) if against is not None else [],
    )


def _changes(run: Evidence, first: int | None) -> list[str]:
    """Sentences in the order of steps, up to the first step out of line."""
    found: list[tuple[int, str]] = [
        (event["iteration"], f"step {event['iteration']}: {str(event.get('text', event['event'])).partition(chr(10))[0]}")
        for event in run.events
    ]  # fmt: skip
    found += [
        (int(audit.get("step", 0)), f"step {audit.get('step', 0)}: audit not as promised: {'; '.join(map(str, audit.get('faults', [])))[:200]}")
        for audit in run.audits
        if not audit.get("ok", True)
    ]  # fmt: skip
    found += _rates(run)
    for before, row in zip(run.curves.rows, run.curves.rows[1:], strict=False):
        one, two = before.get("loss_scale"), row.get("loss_scale")
        if isinstance(one, (int, float)) and isinstance(two, (int, float)) and two > one:
            found.append((row["iteration"], f"step {row['iteration']}: loss scale {one:g} -> {two:g}"))
    return [text for step, text in sorted(found, key=lambda pair: pair[0]) if first is None or step <= first][-8:]


def _rates(run: Evidence) -> list[tuple[int, str]]:
    """Where the learning rate ends its rise, and where it jumps."""
    points = [(row["iteration"], float(row["lr"])) for row in run.curves.rows if row.get("lr")]
    found = []
    for (_, one), (step, two) in itertools.pairwise(points):
        if one > 0 and not 0.5 < two / one < 2.1 and step > 5:
            found.append((step, f"step {step}: learning rate {one:.3g} -> {two:.3g}"))
    peak = max(points, key=lambda point: point[1], default=None)
    if peak is not None and peak[0] > points[0][0]:
        found.append((peak[0], f"step {peak[0]}: the learning rate reaches its peak, {peak[1]:.3g}"))
    return found
