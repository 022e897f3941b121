"""`mpbridge diagnose`: why a run diverged, from the files that it left."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpbridge.diagnose.diagnosis import Diagnosis

SUMMARY = "find the first anomalous step and tensors in a run, and the causes that fit, from its files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder (logger.log_dir)")
    parser.add_argument("--against", type=Path, metavar="RUN_B", help="a run to compare it with, best a healthy one")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a page: one HTML file that loads nothing")
    parser.add_argument("--json", action="store_true", help="the answer as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the diagnosis; 0 for a run without anything out of line, 1 otherwise."""
    from mpbridge.diagnose.diagnosis import diagnose
    from mpbridge.pages.document import writable, write

    if args.out is not None:
        writable(args.out)
    found = diagnose(args.run_folder, args.against)
    if args.json:
        import json

        print(json.dumps(found.as_data(), indent=2, default=str))
    else:
        _print(found)
    if args.out is not None:
        from mpbridge.diagnose.page import diagnosis_page

        sys.stdout.flush()  # the answer first: a page that cannot be written costs the page
        write(args.out, diagnosis_page(found).html())
        if not args.json:
            print(f"\npage: {args.out}")
    return 0 if found.healthy else 1


def _print(found: Diagnosis) -> None:
    from mpbridge.report.console import console

    out = console()

    def say(text: str = "") -> None:
        out.print(text, markup=False, soft_wrap=True)

    say(
        f"{found.run.folder}: {found.run.recipe}, {len(found.run.curves.rows)} steps, {len(found.run.measured)} measured"
    )
    say(found.verdict)
    for one in found.onsets:
        say(f"  step {one.step}: {one.what}")
    for title, lines in (
        ("First anomalous tensors:", [str(one) for one in found.odd[:6]]),
        ("What changed:" if found.healthy else "What changed before:", found.changes),
    ):
        if lines:
            say(f"\n{title}")
            for line in lines:
                say(f"  {line}")
    for number, suspect in enumerate(found.suspects, start=1):
        say(f"\n{number}. {suspect.cause} (step {suspect.step}, evidence {suspect.score:.2f}): {suspect.sentence}")
        for line in suspect.evidence:
            say(f"   seen: {line}")
        for line in suspect.advice:
            say(f"   try:  {line}")
    if found.against:
        say("\nBeside the other run:")
        for line in found.against:
            say(f"  {line}")
    if found.run.gaps:
        say("\nWhat cannot be told:")
        for line in found.run.gaps:
            say(f"  {line}")
