"""`mpbridge report RUN`: the answer after or during a run on one screen: curves, audits, what low precision did, diagnosis, and whether it can resume."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpbridge.cli.diagnose import ARGUMENTS as ARGUMENTS
from mpbridge.cli.text import answer, columns_here, paged, print_line, print_whole

if TYPE_CHECKING:
    from mpbridge.observe.diagnose.diagnosis import Diagnosis
    from mpbridge.observe.diagnose.evidence import Evidence

SUMMARY = "say after or during a run how it went: curves, audits, low precision, diagnosis, whether it can resume"
HEIGHT, WIDTH = 8, 72
"""Lines and columns of the loss."""


def run(args: argparse.Namespace) -> int:
    """Prints the report. Returns 1 if an audit found something else than promised, or something is anomalous."""
    from mpbridge.observe.diagnose.diagnosis import diagnose
    from mpbridge.observe.diagnose.page import diagnosis_page

    with paged(args, lambda: diagnosis_page(found), gap=""):
        found = diagnose(args.run_folder, args.against)
        data = as_data(found)
        answer(args, data, lambda: _print(found, data))
    return 0 if data["ok"] else 1


def as_data(found: Diagnosis) -> dict[str, Any]:
    """Every part of the report as JSON types."""
    from mpbridge.cli.audit import judged

    run = found.run
    audits = judged(run.audits)
    data = {
        "ok": found.healthy and audits["ok"] is not False,
        "run": str(run.folder),
        "recipe": run.recipe,
        "steps": run.curves.rows[-1]["iteration"] if run.curves.rows else 0,
        "of": (run.config.get("train") or {}).get("train_iters"),
        "curves": _curves(run),
        "audits": audits,
        "precision": _precision(run),
        "diagnosis": found.as_data(),
        "resume": _resume(run),
    }
    return data | {"verdict": _verdict(found, data)}


def _verdict(found: Diagnosis, data: dict[str, Any]) -> str:
    """The report in one sentence."""
    parts = {"audits": data["audits"]["ok"] is not False, "diagnosis": found.healthy}
    bad = [name for name, good in parts.items() if not good]
    if not bad and not found.run.curves.rows:
        return "no step was taken, so there is nothing to judge"
    good = f"{'as promised, ' if data['audits']['ok'] else 'not proved by an audit; '}nothing is out of line"
    part = f"{data['steps']} of {data['of']} steps so far: " if data["of"] and data["steps"] < data["of"] else ""
    return f"{part}{'see ' + ' and '.join(bad) if bad else good}"


def _curves(run: Evidence) -> dict[str, dict[str, float | None]]:
    """First, last and lowest value of each curve."""
    from mpbridge.common.report.curves import CURVES

    made: dict[str, dict[str, float | None]] = {}
    series = {number: [value for _, value in run.curves.series(number)] for number in (*CURVES, "lr")}
    series["eval_loss"] = [row["eval_loss"] for row in run.curves.evaluations if row["eval_loss"] is not None]
    for number, values in series.items():
        if values:
            finite = [value for value in values if math.isfinite(value)]
            low, high = min(finite, default=None), max(finite, default=None)
            made[number] = {"lowest": low, "highest": high, "first": values[0], "last": values[-1]}
    return made


def _precision(run: Evidence) -> dict[str, Any]:
    """The worst operand of the latest measurement."""
    from mpbridge.cli.precision import worst

    quantized = [one for one in run.measured if one.tables["operands"]]
    rows = worst(quantized[-1].tables["operands"], 1) if quantized else []
    return {
        "measured_steps": len(run.measured),
        "worst": dict(rows[0]) | {"step": quantized[-1].step} if rows else None,
    }


def _resume(run: Evidence) -> dict[str, Any]:
    """The newest checkpoint from which the run resumes, and why not if it does not."""
    from mpbridge.common.errors import CheckpointError
    from mpbridge.training.checkpoint.store import check, locate, saved, step_of

    named = (run.config.get("checkpoint") or {}).get("save")
    places = [Path(named)] if named and isinstance(named, str) else []
    place = next((one for one in (*places, run.folder, run.folder / "checkpoints") if saved(one)), None)
    why_not = "no checkpoint was found" if named else "checkpoint.save was not set"
    if place is not None:
        try:
            newest = locate(place)
            check(newest, sums=False)
            return {"from": str(newest), "step": step_of(newest), "why_not": None}
        except CheckpointError as error:
            why_not = str(error)
    return {"from": None, "step": None, "why_not": why_not}


def _print(found: Diagnosis, data: dict[str, Any]) -> None:
    from mpbridge.common.report.curves import terminal

    run, of = found.run, data["of"]
    print_line(f"{data['run']}: {data['recipe']}, {data['steps']}{f' of {of}' if of else ''} steps\n")
    loss = run.curves.series("loss")
    if loss:
        width = min(WIDTH, max(10, (columns_here() or 1000) - 12))
        print_whole("\n".join(terminal(loss, width=width, height=HEIGHT, log=False)))
    labels = {"loss": "loss", "eval_loss": "held-out loss", "grad_norm": "gradient norm", "loss_scale": "loss scale"}
    curves = [
        f"{word} {' -> '.join(dict.fromkeys(f'{ends[end]:.4g}' for end in ('first', 'last')))}"
        for name, word in labels.items()
        if (ends := data["curves"].get(name)) and (name != "loss_scale" or ends["highest"] != 1)
    ]
    print_line(
        f"curves     {', '.join(curves) or 'none'} (mpbridge plot)",
        f"audits     {data['audits']['words']} (mpbridge audit)",
        f"precision  {_said(data['precision'])} (mpbridge precision)",
        f"diagnosis  {found.verdict} (mpbridge diagnose)",
    )
    for line in (*found.changes, *found.against):
        print_line(line, indent=" " * 11)
    resume, left = data["resume"], (of or 0) - (data["resume"]["step"] or 0)
    print_line(
        f"resume     from {resume['from']}, {f'{left} steps before its end' if left > 0 else 'at its end'} (mpbridge resume-check)"
        if resume["from"]
        else f"resume     no: {resume['why_not']}"
    )
    for gap in run.gaps if run.measured else [gap for gap in run.gaps if "logger.precision_every" not in gap]:
        print_line(f"not known  {gap}")
    print_line(f"verdict    {data['verdict']}")


def _said(precision: dict[str, Any]) -> str:
    """The worst operand in words."""
    row, count = precision["worst"], precision["measured_steps"]
    measured = f"{count} step{'s' * (count != 1)} measured"
    if row is None:
        return f"{measured}, no quantized GEMM" if count else "nothing was measured, logger.precision_every=1 would"
    error = row["row_error"]
    size = f"row error {error:.2%}" if isinstance(error, float) else "row error not known"
    return f"{measured}; largest at step {row['step']}: {row['linear']} {row['side']} ({row['format']}), {size}"
