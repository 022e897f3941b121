"""The audit as a table."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from mpbridge.audit.findings import Report
from mpbridge.report.tables import table

_STYLES = {"ok": "green", "NO": "bold red", "not observed": "yellow"}


def _bytes(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return "" if not count else f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def audit_table(report: Report) -> Table:
    """Promised against found, one row per fact; offenders follow in `fault_lines`."""
    verdict = "as promised" if report.ok else f"{len(report.faults)} not as promised"
    verdict += f", {len(report.unseen)} not observed" if report.unseen else ""
    title = f"{report.stage} audit, {report.facts.get('engine', '')}, {report.facts.get('world_size', 1)} process(es): {verdict}"
    made = table(title, ("what", "promised", "found", "looked at", "memory", ""), right=("looked at", "memory"))
    for finding in report.findings:
        mark = Text(finding.state, style=_STYLES[finding.state])
        made.add_row(
            finding.subject, finding.promised, finding.found, str(finding.count or ""), _bytes(finding.bytes), mark
        )
    return made


def fault_lines(report: Report) -> list[str]:
    """One line per fault, naming its offenders."""
    return [str(fault) for fault in report.faults] + [
        f"{one.subject}: not observed: {one.unseen}" for one in report.unseen
    ]
