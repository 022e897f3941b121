"""`mpbridge calibrate`: measures GEMMs, copies and collectives on this machine and writes a machine file for estimate, recommend and layouts."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpbridge.cli.options import arg
from mpbridge.cli.text import print_line, print_whole
from mpbridge.common.errors import BadValue

SUMMARY = "measure this machine's GEMMs, copies and collectives, for --machine-file"
ARGUMENTS = (
    arg("--out FILE", "the machine file (default: machine.yaml)", Path, default=Path("machine.yaml")),
    arg("--seconds S", "approximate duration (default: 20, at most 600)", float, default=20.0),
)


def run(args: argparse.Namespace) -> int:
    """Measures, writes and prints; under torchrun also measures collectives, and rank 0 writes."""
    from mpbridge.common.pages.document import writable, write
    from mpbridge.training.simulate.calibrate import measure

    if not 0 < args.seconds <= 600:
        raise BadValue(f"--seconds {args.seconds:g}: expected more than 0 and at most 600")
    writable(args.out)
    text = measure(args.seconds)
    if text is None:
        return 0
    write(args.out, text)
    print_whole(text.removesuffix("\n"))
    print_line(f"written: {args.out}; use it as --machine-file {args.out}")
    return 0
