"""The audit as a table."""

from __future__ import annotations

from mpbridge.common.tables.table import Column, Table, table
from mpbridge.observe.audit.findings import Report

_TONES = {"ok": "", "NO": "bad", "not observed": "warn"}
_COLUMNS = ("what", "promised", "found", Column(name="looked at"), Column(name="memory", unit="bytes"), "")


def audit_table(report: Report) -> Table:
    """Promised against found, one row per fact; offenders follow in `fault_lines`."""
    verdict = "as promised" if report.ok else f"{len(report.faults)} not as promised"
    verdict += f", {len(report.unseen)} not observed" if report.unseen else ""
    title = f"{report.stage} audit, {report.facts.get('engine', '')}, {report.facts.get('world_size', 1)} process(es): {verdict}"
    rows = [(one.subject, one.promised, one.found, one.count or "", one.bytes, one.state) for one in report.findings]
    return table(title, _COLUMNS, rows, tones=[_TONES[one.state] for one in report.findings])


def fault_lines(report: Report) -> list[str]:
    """One line per fault, naming its offenders."""
    return [str(fault) for fault in report.faults] + [
        f"{one.subject}: not observed: {one.unseen}" for one in report.unseen
    ]
