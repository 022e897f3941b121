"""`mpbridge simulate`: builds ranks of any world here with the real megatron-core, on fake groups and meta tensors, and compares them with the predictions."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from mpbridge.cli.options import JSON, RUN, arg, container
from mpbridge.cli.text import answer, print_line, print_table, print_whole, record
from mpbridge.common.errors import BadValue
from mpbridge.common.pages.document import writable, write
from mpbridge.common.tables import size
from mpbridge.settings.container import Run
from mpbridge.training.simulate import Simulated
from mpbridge.training.simulate.world import default_ranks, simulate, simulated_run

SUMMARY = (
    "build ranks of any world here without memory, and compare live tensors, audit and a step with the predictions"
)
ARGUMENTS = (
    *RUN,
    arg("--ranks N,N", "which ranks (default: one each of the first, a middle and the last pipeline stage)"),
    arg("--step", "also simulate one training step: its GEMMs and collectives"),
    JSON,
)


_COLUMNS = (
    "rank", "parameters", "live bytes", "predicted", "rows differ", "audit", "GEMMs", "collectives", "step", "CPU s", "memory"
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Prints a line for each rank. Returns 1 if anything differs."""
    box = container(args)
    made, changed = simulated_run(box, args.world_size or box.smallest_world())
    ranks = _ranks(args.ranks) if args.ranks else default_ranks(made)
    found = simulate(made, ranks, step=args.step)
    ranks_found = [dataclasses.asdict(one) | {"ok": one.ok} for one in found]
    data = record(made, "recipe", "world_size", changed=changed, ranks=ranks_found)
    answer(args, data, lambda: _print(made, changed, found, step=args.step))
    return 0 if all(one.ok for one in found) else 1


def _print(made: Run, changed: Sequence[str], found: Sequence[Simulated], *, step: bool) -> None:
    print_line(
        f"{made.world_size} ranks, recipe {made.recipe}; built here without memory{': ' + ', '.join(changed) if changed else ''}"
    )
    rows = [
        (
            str(one.rank), f"{one.parameters:,}", f"{one.live:,}", f"{one.predicted:,}", f"{len(one.differences)} of {one.rows}",
            f"{one.audited - len(one.audit)} of {one.audited} ok", f"{one.products:,}" if step else "", f"{one.wires:,}" if step else "",
            ("as listed" if not one.step else f"{len(one.step)} differ") if step else "", f"{one.seconds:.1f}", size(one.peak),
        )
        for one in found
    ]  # fmt: skip
    print_table(_COLUMNS, rows)
    for one in found:
        for line in (*one.differences[:10], *one.audit, *one.step):
            print_line(f"rank {one.rank}: {line}")


def _ranks(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise BadValue(f"--ranks {text}: expected comma-separated numbers, such as 0,511,1023") from None


class CalibrateVerb:
    """`mpbridge calibrate`: measures GEMMs, copies and collectives on this machine and writes a machine file for estimate, recommend and layouts."""

    SUMMARY = "measure this machine's GEMMs, copies and collectives, for --machine-file"
    ARGUMENTS = (
        arg("--out FILE", "the machine file (default: machine.yaml)", Path, default=Path("machine.yaml")),
        arg("--seconds S", "approximate duration (default: 20, at most 600)", float, default=20.0),
    )

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Measures, writes and prints; under torchrun also measures collectives, and rank 0 writes."""
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
