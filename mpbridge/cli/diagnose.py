"""`mpbridge diagnose`: explains from its files why a run diverged."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpbridge.cli.options import JSON, arg
from mpbridge.cli.text import answer, paged, print_line

if TYPE_CHECKING:
    from mpbridge.observe.diagnose.diagnosis import Diagnosis

SUMMARY = "find a run's first anomalous step and tensors, and the likely causes, from its files"
ARGUMENTS = (
    arg("run_folder RUN", "the run's folder (logger.log_dir)", Path),
    arg("--against RUN_B", "a run to compare with, preferably a healthy one", Path),
    arg("--out FILE", "write a page: a self-contained HTML file", Path),
    JSON,
)


def run(args: argparse.Namespace) -> int:
    """Prints the diagnosis. Returns 0 if nothing is anomalous, else 1."""
    from mpbridge.observe.diagnose.diagnosis import diagnose
    from mpbridge.observe.diagnose.page import diagnosis_page

    with paged(args, lambda: diagnosis_page(found)):
        found = diagnose(args.run_folder, args.against)
        answer(args, found.as_data(), lambda: _print(found))
    return 0 if found.healthy else 1


def _print(found: Diagnosis) -> None:
    run = found.run
    steps = len(run.curves.rows)
    print_line(
        f"{run.folder}: {run.recipe}, {steps} step{'s' * (steps != 1)}, {len(run.measured)} measured", found.verdict
    )
    for one in found.onsets:
        print_line(f"step {one.step}: {one.what}", indent="  ")
    _section("First anomalous tensors:", [str(one) for one in found.odd[:6]])
    _section("What changed:" if found.healthy else "What changed before:", found.changes)
    for number, suspect in enumerate(found.suspects, start=1):
        print_line()
        print_line(f"{number}. {suspect.cause} (step {suspect.step}, evidence {suspect.score:.2f}): {suspect.sentence}")
        for word, lines in (("seen: ", suspect.evidence), ("try:  ", suspect.advice)):
            for line in lines:
                print_line(f"{word}{line}", indent="   ")
    _section("Compared with the other run:", found.against)
    _section("What cannot be determined:", run.gaps)
    _section("What can still be determined:", run.remaining)


def _section(title: str, lines: Sequence[str]) -> None:
    """Prints lines indented under a title, if there are any."""
    if lines:
        print_line(f"\n{title}")
        print_line(*lines, indent="  ")
