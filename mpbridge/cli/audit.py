"""`mpbridge audit RUN_DIR`: shows what a run promised, what its audits found and when, and what changed between them. Loads no framework."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mpbridge.cli.text import print_json, print_line, print_table
from mpbridge.common.report.history import changes, read_history

SUMMARY = "show what a run's audits found, when, and what changed between them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="the run's folder (logger.log_dir), or its precision.json"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the audits. Returns 0 if all were as promised, 1 if one was not or no update was ever audited."""
    history = read_history(args.run_dir)
    proved = any("weights moved" in one["facts"] for one in history)
    good = proved and all(one["ok"] for one in history)
    if args.json:
        steps = [
            {**one, "changes": changes(before, one)} for before, one in zip([None, *history], history, strict=False)
        ]
        print_json({"ok": good, "audits": steps})
    else:
        _print(history)
        if not proved:
            print_line("no update was ever audited, so main weights and moments are unverified")
    return 0 if good else 1


def _print(history: list[dict[str, Any]]) -> None:
    last = max(history, key=lambda one: ("weights moved" in one["facts"], one["step"]))
    print_line(f"{last['recipe']}, {len(history)} audits; the last complete one, of step {last['step']}:")
    rows = [(name, *map(str, fact)) for name, fact in last["facts"].items()]
    print_table(("what", "promised", "found", ""), rows)
    before = None
    for one in history:
        verdict = "as promised" if one["ok"] else "NOT as promised"
        unseen = len(one.get("not_observed", {}))
        print_line(
            f"step {one['step']:>6}  {one['stage']:<6}  {verdict}{f', {unseen} not observed' if unseen else ''}  ({one['reason']})"
        )
        for line in (*one.get("faults", ()), *changes(before, one)):
            print_line(line, indent=" " * 13)
        before = one
