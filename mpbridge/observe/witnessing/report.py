"""A witness's report of one step: the description, the findings, the nearest recipe; as text, as data, or as an error."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpbridge.common.errors import AuditFailed
from mpbridge.interop.stacks.meaning import LABELS
from mpbridge.observe.audit.findings import Finding, Report, fault_lines, judged
from mpbridge.observe.witnessing.describe import UNSEEN, Description, Nearest, lines

_WIDTH = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Witnessed:
    """One observed step; identical on every rank."""

    step: int
    described: Description
    nearest: Nearest | None
    promised: str
    """Name of the policy that it was judged by; '' if it was only described."""
    report: Report
    """The findings: everything that the policy promises, or without a policy what every sound run satisfies."""
    evaluation: bool = False
    """It is an evaluation, after this step."""

    @property
    def ok(self) -> bool:
        """True when nothing is wrong."""
        return self.report.ok

    @property
    def line(self) -> str:
        """The report in one line."""
        good = len(self.report.findings) - len(self.report.faults) - len(self.report.unseen)
        parts = [f"{good} facts as promised" if self.promised else f"{good} checks passed"]
        parts += [f"{len(self.report.unseen)} not observed"] if self.report.unseen else []
        wrong = ", ".join(fault.subject for fault in self.report.faults)
        parts += [f"{len(self.report.faults)} FAILED ({wrong})"] if self.report.faults else []
        judged = f" against {self.promised}" if self.promised else ""
        what = "an evaluation after step" if self.evaluation else "step"
        return f"witness of {what} {self.step}, {self.described.loop}{judged}: {', '.join(parts)}"

    def __str__(self) -> str:
        rows = [*lines(self.described)]
        if self.nearest is not None:
            rows.append(("nearest recipe", str(self.nearest)))
        followed = (one.found for one in self.report.findings if one.subject == "gradients" and one.ok)
        rows += [("gradients, followed", found) for found in followed]
        width = max(len(name) for name, _ in rows) + 2
        text = [self.line]
        for name, found in rows:
            text += textwrap.wrap(
                found, _WIDTH - width - 2, initial_indent=f"  {name:<{width}}", subsequent_indent=" " * (width + 2)
            )
        text += [f"  {line}" for line in fault_lines(self.report)]
        return "\n".join(text)

    def as_data(self) -> dict[str, Any]:
        """The report as JSON types."""
        return {
            "step": self.step,
            "evaluation": self.evaluation,
            "ok": self.ok,
            "promised": self.promised or None,
            "described": self.described.as_data(),
            "nearest": None if self.nearest is None else self.nearest.as_data(),
            "audit": self.report.as_data(),
        }

    def as_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.as_data(), indent=1)

    def require(self) -> Witnessed:
        """This report. Raises AuditFailed naming every fault if there are any."""
        if self.report.faults:
            found = "\n".join(f"  - {fault}" for fault in self.report.faults)
            what = f"deviates from {self.promised}" if self.promised else "is not a sound training step"
            raise AuditFailed(f"step {self.step} {what}:\n{found}")
        return self


STATES = ("storage", "main", "wire", "accumulator", "optimizer_reads", "exp_avg", "exp_avg_sq", "sharded")
"""Rows that stay as they are for as long as a run lasts, resumes included."""


def changes(now: Description, earlier: Mapping[str, Any]) -> list[Finding]:
    """A fault that names the states that are not what an earlier report (`Witnessed.as_data()`) of the same run found; empty if all are. Rows that one of
    the two could not observe are not compared."""
    before, rows = earlier["described"], now.rows()
    pairs = [(row, _most(before.get(row, UNSEEN)), _most(rows[row])) for row in STATES]
    moved = [f"{LABELS[row]}: {new}, were {old}" for row, old, new in pairs if old != new and UNSEEN not in (old, new)]
    cure = "a resume, a cast or a rebuilt optimizer changed them"
    same = f"as in step {earlier['step']}"
    return [judged("states", same, [moved], found="changed", cure=cure)] if moved else []


def _most(text: str) -> str:
    """A row without what only some of its tensors are."""
    return UNSEEN if text.startswith(UNSEEN) else text.partition(", but ")[0]
