"""`mpbridge report RUN`: the answer after or during a run on one screen: curves, audits, what low precision did, diagnosis, and whether it can resume."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpbridge.cli.options import JSON, arg, whole
from mpbridge.cli.text import answer, columns_here, paged, print_line, print_table, print_whole
from mpbridge.common.errors import CheckpointError
from mpbridge.common.pages.document import writable, write
from mpbridge.common.report.console import console, tell
from mpbridge.common.report.curves import CURVES, changes, read_history, terminal
from mpbridge.common.tables import table
from mpbridge.observe.diagnose.diagnosis import Diagnosis, diagnose
from mpbridge.observe.diagnose.evidence import Evidence, gather
from mpbridge.observe.diagnose.page import diagnosis_page, precision_page
from mpbridge.training.checkpoint.store import check, locate, saved, step_of

SUMMARY = "say after or during a run how it went: curves, audits, low precision, diagnosis, whether it can resume"
ARGUMENTS = (
    arg("run_folder RUN", "the run's folder (logger.log_dir)", Path),
    arg("--against RUN_B", "a run to compare with, preferably a healthy one", Path),
    arg("--out FILE", "write a page: a self-contained HTML file", Path),
    JSON,
)
HEIGHT, WIDTH = 8, 72
"""Lines and columns of the loss."""


def run(args: argparse.Namespace) -> int:
    """Prints the report. Returns 1 if an audit found something else than promised, or something is anomalous."""
    with paged(args, lambda: diagnosis_page(found), gap=""):
        found = diagnose(args.run_folder, args.against)
        data = as_data(found)
        answer(args, data, lambda: _print(found, data))
    return 0 if data["ok"] else 1


def as_data(found: Diagnosis) -> dict[str, Any]:
    """Every part of the report as JSON types."""
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
    parts = {"audits": data["audits"]["ok"] is not False, "diagnosis": found.healthy}
    bad = [name for name, good in parts.items() if not good]
    if not bad and not found.run.curves.rows:
        return "no step was taken, so there is nothing to judge"
    good = f"{'as promised, ' if data['audits']['ok'] else 'not proved by an audit; '}nothing is out of line"
    part = f"{data['steps']} of {data['of']} steps so far: " if data["of"] and data["steps"] < data["of"] else ""
    return f"{part}{'see ' + ' and '.join(bad) if bad else good}"


def _curves(run: Evidence) -> dict[str, dict[str, float | None]]:
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
    quantized = [one for one in run.measured if one.tables["operands"]]
    rows = worst(quantized[-1].tables["operands"], 1) if quantized else []
    found = dict(rows[0]) | {"step": quantized[-1].step} if rows else None
    return {"measured_steps": len(run.measured), "worst": found}


def _resume(run: Evidence) -> dict[str, Any]:
    """The newest checkpoint from which the run resumes, and why not if it does not."""
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
    row, count = precision["worst"], precision["measured_steps"]
    measured = f"{count} step{'s' * (count != 1)} measured"
    if row is None:
        return f"{measured}, no quantized GEMM" if count else "nothing was measured, logger.precision_every=1 would"
    error = row["row_error"]
    size = f"row error {error:.2%}" if isinstance(error, float) else "row error not known"
    return f"{measured}; largest at step {row['step']}: {row['linear']} {row['side']} ({row['format']}), {size}"


def _print_diagnosis(found: Diagnosis) -> None:
    run = found.run
    steps = len(run.curves.rows)
    taken = f"{steps} step{'s' * (steps != 1)}, {len(run.measured)} measured"
    print_line(f"{run.folder}: {run.recipe}, {taken}", found.verdict)
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
    if lines:
        print_line(f"\n{title}")
        print_line(*lines, indent="  ")


class DiagnoseVerb:
    """`mpbridge diagnose`: explains from its files why a run diverged."""

    SUMMARY = "find a run's first anomalous step and tensors, and the likely causes, from its files"
    ARGUMENTS = ARGUMENTS

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Prints the diagnosis. Returns 0 if nothing is anomalous, else 1."""
        with paged(args, lambda: diagnosis_page(found)):
            found = diagnose(args.run_folder, args.against)
            answer(args, found.as_data(), lambda: _print_diagnosis(found))
        return 0 if found.healthy else 1


UNPROVED = "no update was ever audited, so main weights and moments are unverified"


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


def _print_audits(audits: list[dict[str, Any]]) -> None:
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


class AuditVerb:
    """`mpbridge audit RUN_DIR`: shows what a run promised, what its audits found and when, and what changed between them. Loads no framework."""

    SUMMARY = "show what a run's audits found, when, and what changed between them"
    ARGUMENTS = (arg("run_dir RUN_DIR", "the run's folder (logger.log_dir), or its precision.json", Path), JSON)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Prints the audits. Returns 0 if all were as promised, 1 if one was not or no update was ever audited."""
        history = read_history(args.run_dir)
        found = judged(history)
        pairs = zip([None, *history], history, strict=False)
        audits = [{**one, "changes": changes(before, one)} for before, one in pairs]
        data = {"ok": found["ok"] is True, "words": found["words"], "audits": audits}
        answer(args, data, lambda: _print_audits(audits))
        if found["ok"] is None and not args.json:
            print_line(UNPROVED)
        return 0 if found["ok"] else 1


def _worst_table(step: int, rows: Sequence[Mapping[str, Any]], top: int) -> object:
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


class PrecisionVerb:
    """`mpbridge precision`: shows what low precision does to a run's tensors during training."""

    SUMMARY = "show what low precision does to a run's tensors: worst operands, and a page"
    ARGUMENTS = (
        arg("run_folder RUN", "the run's folder (logger.log_dir)", Path),
        arg("--out FILE", "the page (default: precision.html in the folder)", Path),
        arg("--top N", "operands to print (default: 10)", whole, least=1, default=10),
    )

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Prints the worst operands of the latest measurement and writes the page. Returns 1 if nothing was measured."""
        target = args.out or args.run_folder / "precision.html"
        found = gather(args.run_folder)
        writable(target)
        out = console()
        for gap in found.gaps:
            print_line(gap)
        measured = [one for one in found.measured if one.tables["operands"]]
        if measured:
            out.print(_worst_table(measured[-1].step, measured[-1].tables["operands"], args.top))
        elif found.measured:
            print_line("no GEMM of this run is quantized: its linears and weights are on the page")
        write(target, precision_page(found).html())
        tell(out, f"page: {target}")
        return 0 if found.measured else 1
