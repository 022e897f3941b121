"""`mpbridge precision`: shows what low precision does to a run's tensors during training."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpbridge.cli.options import arg, whole

SUMMARY = "show what low precision does to a run's tensors: worst operands, and a page"
ARGUMENTS = (
    arg("run_folder RUN", "the run's folder (logger.log_dir)", Path),
    arg("--out FILE", "the page (default: precision.html in the folder)", Path),
    arg("--top N", "operands to print (default: 10)", whole, least=1, default=10),
)


def run(args: argparse.Namespace) -> int:
    """Prints the worst operands of the latest measurement and writes the page. Returns 1 if nothing was measured."""
    from mpbridge.cli.text import print_line
    from mpbridge.common.pages.document import writable, write
    from mpbridge.common.report.console import console, tell
    from mpbridge.observe.diagnose.evidence import gather
    from mpbridge.observe.diagnose.page import precision_page

    target = args.out or args.run_folder / "precision.html"
    found = gather(args.run_folder)
    writable(target)
    out = console()
    for gap in found.gaps:
        print_line(gap)
    measured = [one for one in found.measured if one.tables["operands"]]
    if measured:
        out.print(_table(measured[-1].step, measured[-1].tables["operands"], args.top))
    elif found.measured:
        print_line("no GEMM of this run is quantized: its linears and weights are on the page")
    write(target, precision_page(found).html())
    tell(out, f"page: {target}")
    return 0 if found.measured else 1


def _table(step: int, rows: Sequence[Mapping[str, Any]], top: int) -> object:
    from mpbridge.common.tables import table

    columns = ("linear", "operand", "format", "flushed", "saturated", "row error", "SQNR dB", "amax", "scale", "stale")

    made = []
    for row in worst(rows, top):
        cells = [row["linear"], f"{row['side']} {row['copy']}", row["format"]]
        cells += [_shown(row[name], "{:.2%}") for name in ("flushed", "saturated", "row_error")]
        cells += [_shown(row[name], text) for name, text in (("sqnr", "{:.1f}"), ("amax", "{:.3g}"), ("scale", "{:.3g}"), ("staleness", "2**{:+.1f}"))]  # fmt: skip
        made.append(cells)
    return table(f"operands with the largest row errors, step {step}", columns, made, right=columns[3:])


def worst(rows: Sequence[Mapping[str, Any]], top: int) -> list[Mapping[str, Any]]:
    """The rows with the largest row errors, largest first."""
    known = [row["row_error"] if isinstance(row["row_error"], float) else 0.0 for row in rows]
    return [rows[i] for i in sorted(range(len(rows)), key=known.__getitem__, reverse=True)[:top]]


def _shown(value: object, text: str) -> str:
    return text.format(value) if isinstance(value, (int, float)) else ""
