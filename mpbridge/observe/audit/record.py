"""The audits of a run in its folder: precision.json keeps the first and the latest in full, and a short form of each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpbridge.common.errors import BadValue
from mpbridge.common.files import write
from mpbridge.common.report.curves import PRECISION, changes, read_history
from mpbridge.observe.audit.findings import Report

__all__ = ["PRECISION", "earlier", "entry", "write_section"]

KEPT = 200
"""Number of the latest audits kept in short form; of older ones, the first and those that found something else than the one before."""


def entry(report: Report, *, reason: str, step: int) -> dict[str, Any]:
    """One audit in short form: when, why, and [promised, found, verdict] of every fact."""
    return {
        "stage": report.stage,
        "step": step,
        "reason": reason,
        "ok": report.ok,
        "recipe": report.facts.get("recipe", ""),
        "facts": {one.subject: [one.promised, one.found, one.state] for one in report.findings},
        **({"faults": [str(fault) for fault in report.faults]} if report.faults else {}),
        **({"not_observed": {one.subject: one.unseen for one in report.unseen}} if report.unseen else {}),
    }


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
    try:
        return read_history(folder)
    except BadValue:
        return []
