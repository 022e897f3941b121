"""The audit's results: one Finding per fact, a Report for the whole run, their text, table and JSON forms, and all audits of a run in its precision.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mpbridge.common.errors import AuditFailed, BadValue
from mpbridge.common.files import write
from mpbridge.common.report.curves import changes, read_history
from mpbridge.common.tables import Column, Table, processes, table


def offenders(by_rank: Sequence[Iterable[str]]) -> tuple[str, ...]:
    """What any rank reports, in order: 'name' if every rank does, 'name (rank 1)' if some do."""
    lists = [list(dict.fromkeys(one)) for one in by_rank]
    everyone = set(lists[0]).intersection(*map(set, lists[1:])) if lists else set()
    named = (n if n in everyone else f"{n} (rank {rank})" for rank, names in enumerate(lists) for n in names)
    return tuple(dict.fromkeys(named))


def joined(found: Iterable[str]) -> str:
    """Distinct words, sorted, as 'bf16/fp32'."""
    return "/".join(sorted(set(found))) or "nothing"


AuditStage = Literal["static", "live"]
SHOWN = 3
"""How many offenders a line of text names; `as_data` has them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fact of the policy and what was seen of it on all ranks."""

    subject: str
    """'params', 'exp_avg', 'linears', 'wire: gradients', 'autocast', 'weights moved' ..."""
    promised: str
    found: str
    ok: bool
    count: int = 0
    """Tensors, elements, modules or flags that were looked at, summed over ranks."""
    bytes: int = 0
    """Bytes of the tensors looked at, summed over ranks; 0 if there are none."""
    offenders: tuple[str, ...] = ()
    """Parameters, modules, flags or ranks that are not as promised."""
    cure: str = ""
    """How to fix it."""
    unseen: str = ""
    """Why it could not be observed in this run; such a finding is neither as promised nor a fault, and is counted separately."""

    @property
    def state(self) -> str:
        """'ok', 'NO' or 'not observed'."""
        return "not observed" if self.unseen else "ok" if self.ok else "NO"

    def __str__(self) -> str:
        more = len(self.offenders) - SHOWN
        who = ", ".join(self.offenders[:SHOWN]) + (f" and {more} more" if more > 0 else "")
        text = f"{self.subject}: promised {self.promised}, found {self.found}"
        return text + (f" ({who})" if who else "") + (f"; {self.cure}" if self.cure else "")

    def as_data(self) -> dict[str, Any]:
        """The finding as JSON types."""
        data = {name: getattr(self, name) for name in ("subject", "promised", "found", "ok", "count", "bytes")}
        more = {"offenders": list(self.offenders), "cure": self.cure, "not_observed": self.unseen}
        return data | {name: value for name, value in more.items() if value}


def judged(
    subject: str,
    promised: str,
    by_rank: Sequence[Iterable[str]],
    *,
    found: str = "different",
    seen: str = "",
    cure: str = "",
    **more: Any,
) -> Finding:
    """A fact that holds if no rank names an offender; found, cure: what to say if one does. seen: what was found in either case."""
    wrong = offenders(by_rank)
    said, cure = seen or (found if wrong else promised), cure if wrong else ""
    return Finding(subject=subject, promised=promised, found=said, ok=not wrong, offenders=wrong, cure=cure, **more)


def not_observed(subject: str, promised: str, why: str) -> Finding:
    """A fact that leaves no evidence in this run."""
    return Finding(subject=subject, promised=promised, found="not observed", ok=False, unseen=why)


def nothing(subject: str, promised: str, cure: str) -> Finding:
    """A promise of which this run should have shown something."""
    return Finding(subject=subject, promised=promised, found="nothing was seen", ok=False, cure=cure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The audit of one stage; identical on every rank."""

    stage: AuditStage
    findings: tuple[Finding, ...]
    layouts: tuple[Mapping[str, Any], ...] = ()
    """Rank 0's {'roles': {role: dtype}, 'parameters': [names]}, each distinct combination once."""
    seconds: float = 0.0
    """Wall time of this rank's own inspection."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Recipe, fingerprint, engine, step, world size."""

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that are not as promised."""
        return tuple(finding for finding in self.findings if not finding.ok and not finding.unseen)

    @property
    def unseen(self) -> tuple[Finding, ...]:
        """What could not be observed."""
        return tuple(finding for finding in self.findings if finding.unseen)

    @property
    def line(self) -> str:
        """The whole report in one line."""
        step = self.facts.get("step")
        when = f"{self.stage} audit" + (f" of step {step}" if step else "") + f", {self.facts.get('engine', '')}"
        return f"{when}: {self.counted('facts as promised', 'NOT as promised')}"

    def counted(self, good: str, bad: str) -> str:
        """How many facts are as promised, not observed and not as promised, in these words; of the last their names."""
        parts = [f"{len(self.findings) - len(self.faults) - len(self.unseen)} {good}"]
        parts += [f"{len(self.unseen)} not observed"] if self.unseen else []
        wrong = ", ".join(fault.subject for fault in self.faults)
        return ", ".join([*parts, *([f"{len(self.faults)} {bad} ({wrong})"] if self.faults else [])])

    def _repr_html_(self) -> str:
        """HTML for notebooks: every fact, with those that are not as promised marked."""
        rows = [(one.subject, one.promised, one.found, one.state, one.offenders) for one in self.findings]
        tones = [_TONES[one.state] for one in self.findings]
        return table(self.line, ("subject", "promised", "found", "", "where"), rows, tones=tones).html()

    @property
    def ok(self) -> bool:
        """True when nothing differs from the promise."""
        return not self.faults

    def find(self, subject: str) -> Finding:
        """The finding about `subject`. Raises KeyError when the audit has none."""
        return {finding.subject: finding for finding in reversed(self.findings)}[subject]

    def require(self) -> Report:
        """This report; raises AuditFailed naming every fault when there is one."""
        if self.faults:
            lines = "\n".join(f"  - {fault}" for fault in self.faults)
            head = f"the {self.stage} audit found deviations from the policy:"
            raise AuditFailed(f"{head}\n{lines}\n(train.audit=warn continues despite it)")
        return self

    def in_short(self, *, reason: str, step: int) -> dict[str, Any]:
        """As JSON types: when, why, and [promised, found, verdict] of every fact."""
        return {
            "stage": self.stage,
            "step": step,
            "reason": reason,
            "ok": self.ok,
            "recipe": self.facts.get("recipe", ""),
            "facts": {one.subject: [one.promised, one.found, one.state] for one in self.findings},
            **({"faults": [str(fault) for fault in self.faults]} if self.faults else {}),
            **({"not_observed": {one.subject: one.unseen for one in self.unseen}} if self.unseen else {}),
        }

    def as_data(self) -> dict[str, Any]:
        """The report as JSON types: the 'audit' section of precision.json."""
        return {
            "ok": self.ok,
            **self.facts,
            "seconds": round(self.seconds, 6),
            "findings": [finding.as_data() for finding in self.findings],
            "parameters": [dict(layout) for layout in self.layouts],
        }


_TONES = {"ok": "", "NO": "bad", "not observed": "warn"}
_COLUMNS = ("what", "promised", "found", Column(name="looked at"), Column(name="memory", unit="bytes"), "")


def audit_table(report: Report) -> Table:
    """Promised against found, one row per fact; offenders follow in `fault_lines`."""
    verdict = "as promised" if report.ok else f"{len(report.faults)} not as promised"
    verdict += f", {len(report.unseen)} not observed" if report.unseen else ""
    title = f"{report.stage} audit, {report.facts.get('engine', '')}, {processes(report.facts.get('world_size', 1))}: {verdict}"
    rows = [(one.subject, one.promised, one.found, one.count or "", one.bytes, one.state) for one in report.findings]
    return table(title, _COLUMNS, rows, tones=[_TONES[one.state] for one in report.findings])


def fault_lines(report: Report) -> list[str]:
    """One line per fault, naming its offenders."""
    unseen = [f"{one.subject}: not observed: {one.unseen}" for one in report.unseen]
    return [str(fault) for fault in report.faults] + unseen


KEPT = 200
"""Number of the latest audits kept in short form; of older ones, the first and those that found something else than the one before."""


def write_section(path: Path, report: Report, *, history: Sequence[Mapping[str, Any]] = ()) -> None:
    """Writes the report under 'audit' / its stage in precision.json, and the short forms under 'history'; other sections are kept."""
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    section = data.setdefault("audit", {})
    section[report.stage] = report.as_data()
    if history:
        section["history"] = _kept(history)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(data, indent=2) + "\n")


def _kept(history: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    older = history[:-KEPT]
    return [
        one
        for before, one in zip([None, *older], older, strict=False)
        if before is None or not one["ok"] or one.get("recipe") != before.get("recipe") or changes(before, one)
    ] + list(history[-KEPT:])


def earlier(folder: Path) -> list[dict[str, Any]]:
    """The audits that a run left in `folder`; empty if there are none that can be read."""
    with suppress(BadValue):
        return read_history(folder)
    return []
