"""The audits in a run's precision.json, read without any framework."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpbridge.common.errors import BadValue
from mpbridge.common.files import text_of

PRECISION = "precision.json"
"""File in the run's folder: what was requested, decided, overridden and found."""


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The audits of the run in `folder`, oldest first. Raises BadValue if there are none."""
    path = folder / PRECISION if folder.is_dir() else folder
    try:
        section = json.loads(text_of(path, kind="json"))["audit"]
        history = [_audit(one) for one in section["history"]]
        if not history:
            raise ValueError("no audit")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise BadValue(
            f"{path} has no audits (expected the precision.json of a run: `mpbridge train ... logger.log_dir=DIR`)"
        ) from None
    return history


def _audit(one: Any) -> dict[str, Any]:
    """The audit, checked to have everything that readers need. Raises ValueError otherwise."""
    audit = {"stage": "", "reason": "", "recipe": "", "faults": [], "not_observed": {}, **one}
    facts, faults = audit["facts"], audit["faults"]
    words = all(isinstance(audit[name], str) for name in ("stage", "reason", "recipe"))
    kinds = (
        words
        and type(audit["step"]) is int
        and type(audit["ok"]) is bool
        and isinstance(audit["not_observed"], (dict, list))
    )
    lists = isinstance(facts, dict) and isinstance(faults, list) and all(isinstance(fact, list) and len(fact) == 3 for fact in facts.values())  # fmt: skip
    if not (kinds and lists):
        raise ValueError("not an audit's short form")
    return audit


def changes(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> list[str]:
    """What an audit found differently from the previous one, as 'exp_avg: found bf16, before fp32'; counts that vary naturally are omitted."""
    lines: list[str] = []
    if before is None or before["stage"] != after["stage"]:
        return lines
    for subject, (promised, found, state) in after["facts"].items():
        old = before["facts"].get(subject)
        if old is None:
            continue
        if (old[0], old[2]) != (promised, state) or (old[1] != found and subject not in _VARYING):
            lines.append(
                f"{subject}: {found} ({state}), before {old[1]} ({old[2]})"
                + ("" if old[0] == promised else f", promised {promised} instead of {old[0]}")
            )
    return lines


_VARYING = frozenset({"gradient norm", "weights moved", "loss scale", "quantized GEMMs"})
