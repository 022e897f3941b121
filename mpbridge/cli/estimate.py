"""`mpbridge estimate`: predicts how long a step takes on a machine, with an error band, and where the time goes."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpbridge.cli._schedule import names_of, print_schedule, schedule_data, title
from mpbridge.cli._target import TARGET, TargetMachine, on_target, reference, sizes_of, target
from mpbridge.cli.options import JSON, PRICE, RUN, arg, resolved
from mpbridge.cli.text import answer, print_line, print_table, record
from mpbridge.common.errors import BadValue, MpbridgeError
from mpbridge.common.pages.document import writable
from mpbridge.common.report.curves import Panel, drawable, stacked_bars
from mpbridge.common.tables import GIB
from mpbridge.planning.estimate.predict import Estimate, timing
from mpbridge.planning.memory.by_role import REFERENCE, Memory
from mpbridge.planning.outlook import Outlook
from mpbridge.settings.container import ConfigContainer, Run

SUMMARY = "predict step time, tokens/s and where the time goes, with an error band"
ARGUMENTS = (
    *RUN,
    *TARGET,
    PRICE,
    arg("--plot FILE", "a picture: breakdown of time and memory compared with bf16_mixed (requires matplotlib)"),
    arg("--against RUN_DIR", "compare with a run: its configuration and measured step time (its logger.log_dir)"),
    JSON,
)


def run(args: argparse.Namespace) -> int:
    """Prints the prediction."""
    drawn = False
    if args.plot is not None:
        writable(Path(args.plot), option="--plot")  # before any prediction
        drawn = drawable()
    where = target(args)
    measured = timing(Path(args.against)) if args.against else None
    if measured is None:
        made = resolved(args, machine=where.machine, versions=where.versions)
    elif measured.config:
        made = on_target(ConfigContainer(**measured.config, trusted=False), measured.world_size, where)
    else:
        raise BadValue("the run was created from Python objects, so its folder has no configuration to predict from")
    outlook = where.outlook(made)
    mine = outlook.time
    plain, other = _reference(made, where)
    theirs = None if other is None else _data(REFERENCE, other, args.price)
    data = _data(names_of(made), mine, args.price) | {"reference": theirs}
    data |= record(outlook, "verdict", "objections", schedule=schedule_data(made, outlook))
    answer(args, data, lambda: _print(made, where, outlook, other, args.price))
    if not args.json:
        for words in outlook.objections.values():
            print_line(f"\nnot as configured: {words} (mpbridge check)")
    if measured is not None and not args.json:
        print_line(
            f"\nmeasured: {measured.seconds:.3g} s (median of {measured.steps} steps), {measured.tokens_per_second:,.0f} tokens/s per process; predicted over measured {mine.seconds / measured.seconds:.2f}"
        )
    if drawn:
        sys.stdout.flush()  # print the answer first, in case the picture cannot be written
        _plot(Path(args.plot), made, plain, where, mine, other)
    return 0


def _reference(made: Run, where: TargetMachine) -> tuple[Run | None, Estimate | None]:
    """bf16_mixed on the same machine and layout, and its time; None if it cannot run there, has no time or is the requested recipe."""
    run = time = None
    if made.recipe != REFERENCE or len(made.stages) > 1:
        with contextlib.suppress(MpbridgeError):
            run = reference(made, where)
            time = where.outlook(run).time
    return run, time


def _data(recipe: str, one: Estimate, price: float | None) -> dict[str, Any]:
    hours = one.gpu_hours_per_billion_tokens
    return {
        "recipe": recipe, "predicted": True, **record(one, "seconds", "band", "span", "because"),
        "tokens_per_second_per_gpu": one.tokens_per_second, "model_tflops_per_gpu": one.flops_per_second / 1e12,
        "share_of_peak": one.share_of_peak, "gpu_hours_per_billion_tokens": hours,
        "price_per_billion_tokens": None if price is None else price * hours, **record(one, "parts", "left_out"),
    }  # fmt: skip


def _print(made: Run, where: TargetMachine, outlook: Outlook, other: Estimate | None, price: float | None) -> None:
    mine = outlook.time
    (low, high), hours = mine.span, mine.gpu_hours_per_billion_tokens
    cost = f", {price * hours:,.0f} at {price:g} per hour" if price is not None else ""
    print_line(
        f"{title(made)}, engine {made.engine}, {made.facts.parallel.world_size} x {where.machine.label}: a prediction",
        f"{sizes_of(made.facts.parallel)}\n",
        f"step          {mine.seconds:.3g} s ({low:.3g} to {high:.3g}; {mine.because})",
        f"tokens/s/GPU  {mine.tokens_per_second:,.0f}",
        f"model TFLOP/s {_few(mine.flops_per_second / 1e12)} per GPU, {mine.share_of_peak:.0%} of the dense peak of its narrowest products",
        f"GPU hours     {hours:,.0f} per billion tokens{cost}",
    )
    theirs: Mapping[str, float] = {} if other is None else other.parts
    if other is not None:
        faster = f"{other.seconds / mine.seconds:.2f} times as fast ({other.seconds:.3g} s)"
        print_line(f"compared with {REFERENCE} in the same layout: {faster}")
    print_line()
    print_schedule(made, outlook)
    rows = []
    for name in dict.fromkeys([*mine.parts, *theirs]):
        seconds, plain = mine.parts.get(name, 0.0), theirs.get(name, 0.0)
        beside = f"{plain * 1000:,.1f}" if other else ""
        rows.append((name, f"{seconds * 1000:,.1f}", f"{seconds / mine.seconds:.1%}", beside))
    print_table(("where the time goes", "ms", "share", f"{REFERENCE} ms"), rows)
    for line in mine.left_out:
        print_line(f"left out: {line}")


def _few(value: float) -> str:
    """Integers from 10 on, three digits below: a CPU has less than one TFLOP/s."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _plot(
    path: Path, made: Run, plain: Run | None, where: TargetMachine, mine: Estimate, other: Estimate | None
) -> None:
    """Two panels: where the time goes, and the fullest rank's memory, with the recipe above bf16_mixed."""
    time = {names_of(made): mine.parts} | ({REFERENCE: other.parts} if other is not None else {})
    held = {names_of(run): _by_role(where.outlook(run).memory) for run in (made, plain) if run is not None}
    panels = (
        Panel(f"Predicted step, {mine.world} GPUs", "seconds per step", time),
        Panel("Predicted memory of the fullest rank, by role", "GiB", held),
    )
    stacked_bars(path, panels)


def _by_role(one: Memory) -> dict[str, float]:
    """GiB by role: states, activations, and memory other than these, including what torch does not count."""
    beside = {part.name: part.bytes for part in (*one.overheads, *one.outside)}
    return {name: held / GIB.size for name, held in {**one.roles, "activations": one.activations, **beside}.items()}
