"""`mpbridge plot`: draws the curves of runs, in the terminal and as a picture."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from mpbridge.cli.options import arg, whole
from mpbridge.cli.text import columns_here, print_line, print_whole
from mpbridge.common.errors import Refused
from mpbridge.common.pages.document import writable
from mpbridge.common.report.console import warn
from mpbridge.common.report.curves import CURVES, Curves, drawable, picture, read_curves, terminal

COLUMNS, AXIS = 72, 12
"""Default width of a plot in columns, and maximum width of its labels."""
SUMMARY = "plot loss, gradient norm, loss scale and tokens/s of runs, in the terminal and as PNG"
ARGUMENTS = (
    arg("runs RUN", "folders of runs (logger.log_dir)", Path, nargs="+"),
    arg("--out FILE", "the picture (default: curves.png in the first run's folder)", Path),
    arg("--no-picture", "the terminal only"),
    arg("--width N", f"columns of a plot (default: the terminal's, at most {COLUMNS})", whole, least=10),
)


def run(args: argparse.Namespace) -> int:
    """Prints one plot for each number and run, and writes the picture; without matplotlib only the picture is missing."""
    target = args.out or (args.runs[0] if args.runs[0].is_dir() else args.runs[0].parent) / "curves.png"
    if not args.no_picture:
        writable(target)
    drawn = not args.no_picture and drawable()
    found = [curves for curves in _read(args.runs) if curves.rows or curves.evaluations]
    if not found:
        raise Refused(
            f"{args.runs[0]}: no step was taken yet, so there is nothing to plot (mpbridge report says what there is)"
        )
    width = args.width or min(COLUMNS, max(10, (columns_here() or 1000) - AXIS))
    for number in CURVES:
        for curves in found:
            _print(curves, number, width)
    if drawn:
        sys.stdout.flush()
        picture(found, target)
        print_line(f"picture: {target}")
    return 0


def _read(runs: list[Path]) -> list[Curves]:
    """The runs' curves, labelled by path if names are equal; reports what could not be read on stderr."""
    found = [read_curves(path) for path in runs]
    if len({curves.name for curves in found}) < len(found):
        for curves, path in zip(found, runs, strict=True):
            curves.name = str(path)
    for curves in found:
        for fault in curves.faults:
            warn(f"{curves.name}: {fault}")
    return found


def _print(curves: Curves, number: str, width: int) -> None:
    label, log = CURVES[number]
    points = curves.series(number)
    if not points or (number == "loss_scale" and {value for _, value in points} == {1.0}):
        return
    odd = sum(not math.isfinite(value) for _, value in points)
    print_line(f"{curves.name}: {label}" + (f" ({odd} of {len(points)} steps not finite)" if odd else ""))
    print_whole("\n".join(terminal(points, width=width, log=log)))
