"""`mpbridge audit RUN_DIR`: shows what a run promised, what its audits found and when, and what changed between them. Loads no framework."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpbridge.cli.options import JSON, arg
from mpbridge.cli.text import answer, print_line, print_table
from mpbridge.common.report.curves import changes, read_history

UNPROVED = "no update was ever audited, so main weights and moments are unverified"
SUMMARY = "show what a run's audits found, when, and what changed between them"
ARGUMENTS = (arg("run_dir RUN_DIR", "the run's folder (logger.log_dir), or its precision.json", Path), JSON)


def run(args: argparse.Namespace) -> int:
    """Prints the audits. Returns 0 if all were as promised, 1 if one was not or no update was ever audited."""
    history = read_history(args.run_dir)
    found = judged(history)
    audits = [{**one, "changes": changes(before, one)} for before, one in zip([None, *history], history, strict=False)]
    answer(args, {"ok": found["ok"] is True, "words": found["words"], "audits": audits}, lambda: _print(audits))
    if found["ok"] is None and not args.json:
        print_line(UNPROVED)
    return 0 if found["ok"] else 1


def judged(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """{"ok": whether all were as promised, or None if no update was ever audited; "words": the same in a sentence; "audits": how many}."""
    bad = [one for one in history if not one["ok"]]
    proved = any("weights moved" in one["facts"] for one in history)
    if bad:
        words = f"{len(bad)} of {len(history)} not as promised, first at step {bad[0]['step']}: {'; '.join(bad[0].get('faults', ())) or 'see there'}"
    elif not history:
        words = "none"
    else:
        words = f"{len(history)} as promised, the last of step {history[-1]['step']}" if proved else UNPROVED
    return {"ok": False if bad else True if proved else None, "audits": len(history), "words": words}


def _print(audits: list[dict[str, Any]]) -> None:
    last = max(audits, key=lambda one: ("weights moved" in one["facts"], one["step"]))
    print_line(f"{last['recipe']}, {len(audits)} audits; the last complete one, of step {last['step']}:")
    rows = [(name, *map(str, fact)) for name, fact in last["facts"].items()]
    print_table(("what", "promised", "found", ""), rows)
    for one in audits:
        verdict = "as promised" if one["ok"] else "NOT as promised"
        unseen = len(one.get("not_observed", {}))
        print_line(
            f"step {one['step']:>6}  {one['stage']:<6}  {verdict}{f', {unseen} not observed' if unseen else ''}  ({one['reason']})"
        )
        for line in (*one.get("faults", ()), *one["changes"]):
            print_line(line, indent=" " * 13)
