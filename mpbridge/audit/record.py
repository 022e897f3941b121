"""The audits of a run in its folder: precision.json keeps the first and the newest whole, and what each of them said."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpbridge.audit.findings import Report
from mpbridge.errors import BadValue

PRECISION = "precision.json"
KEPT = 200
"""Audits that are kept in short form; the first one always."""


def entry(report: Report, *, reason: str, step: int) -> dict[str, Any]:
    """One audit in short: when, why, and every fact in three words."""
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
    """Puts the report under 'audit' / its stage into precision.json, and the short forms under 'history', leaving what else is there."""
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    section = data.setdefault("audit", {})
    section[report.stage] = report.as_data()
    if history:
        section["history"] = [history[0], *history[1:][-KEPT:]]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n")


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The audits of the run in `folder`, oldest first. Raises BadValue where there is nothing of the kind."""
    path = folder / PRECISION if folder.is_dir() else folder
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        history = data["audit"]["history"]
        if not isinstance(history, list) or not all(isinstance(one, dict) and "facts" in one for one in history):
            raise ValueError(path)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise BadValue(
            f"{path} holds no audits (expected the precision.json of a run: `mpbridge train ... logger.log_dir=DIR`)"
        ) from None
    return history


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What one audit found otherwise than the one before it, as 'exp_avg: found bf16, before fp32'; counts that vary by nature are left out."""
    lines = []
    for subject, (promised, found, state) in after["facts"].items():
        old = before["facts"].get(subject)
        if old is None:
            continue
        if (old[0], old[2]) != (promised, state) or (old[1] != found and subject not in _VARYING):
            lines.append(
                f"{subject}: {found} ({state}), before {old[1]} ({old[2]})"
                + ("" if old[0] == promised else f", promised {promised} in place of {old[0]}")
            )
    return lines


_VARYING = frozenset({"gradient norm", "weights moved", "loss scale", "quantized GEMMs"})


def last_good(folder: Path) -> str | None:
    """Name of the newest checkpoint in `folder` whose manifest says that an audit found it good; None where there is none."""
    found = []
    for path in folder.glob("*/manifest.json"):
        try:
            if json.loads(path.read_text(encoding="utf-8")).get("audit") == "good":
                found.append(path.parent.name)
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
    return max(found, default=None)
