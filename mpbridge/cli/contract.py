"""`mpbridge contract DIR`: compares a folder of quantized weights with the run that trained them, and its list of modules with what engines make of it."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpbridge.cli.options import JSON, arg
from mpbridge.cli.text import answer, print_line, print_table, record
from mpbridge.common.errors import BadValue, UnknownName
from mpbridge.common.files import LIMITS, regular, why
from mpbridge.common.machines import machine
from mpbridge.common.report.progress import bar
from mpbridge.settings.huggingface.folder import PREFIX, folder_of
from mpbridge.settings.huggingface.kept import ENGINES
from mpbridge.training.checkpoint.store import locate

if TYPE_CHECKING:
    from mpbridge.training.serving.differences import Difference
    from mpbridge.training.serving.folder import Report
    from mpbridge.training.serving.mismatch import Mismatch


SUMMARY = "compare a folder of served weights with the run that trained them"
MOST = 12
"""Maximum number of rows that are printed; --json has all."""
ARGUMENTS = (
    arg("folder DIR", "a folder in Hugging Face's layout, quantized by mpbridge or by another tool"),
    arg("--run DIR", "the checkpoint that it should hold, or a folder of them"),
    arg("--recipe NAME", "with --run: the recipe (a name or a YAML file) by which it should be quantized (default: the run's)"),
    arg("--engine E", f"also resolve the list of modules in high precision by these engines' own rules: {', '.join(ENGINES)} (commas between)"),
    arg("--target GPU", "also check the kind of scales against this GPU"),
    JSON,
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Prints what differs, worst first. Returns 0 if nothing does, 1 otherwise."""
    from mpbridge.training.serving.folder import examine

    if args.recipe and not args.run:
        raise BadValue(f"--recipe {args.recipe}: only with --run, whose weights it quantizes")
    folder = folder_of(f"{PREFIX}{args.folder.removeprefix(PREFIX)}")
    path = None if args.run is None else locate(Path(args.run.removeprefix("ckpt:")))
    gpu = None if args.target is None else machine(args.target)
    with bar("compared", quiet=args.json) as told:
        report = examine(folder, path, recipe=args.recipe, engines=_engines(args.engine), target=gpu, told=told)
    errors = ((one, one.error if one.error < float("inf") else None) for one in report.found)
    differences = [record(one, "name", "kind", what=one.text, error=error) for one, error in errors]
    said = {"high_precision": report.high, "differences": differences, "notes": report.notes}
    facts = {"folder": str(folder), **record(report, "format", "recipe", "quantized", **said)}
    answer(args, facts, lambda: _print(folder, path, report))
    return 1 if report.found else 0


def _print(folder: Path, path: Path | None, report: Report) -> None:
    counts = f"{report.quantized} linears quantized, {report.high} in high precision"
    print_line(f"{folder}: {report.format}, {counts}{f'; trained with {report.recipe}' if report.recipe else ''}")
    rows = _rows(report.found)
    print_table(("where", "what", "values off by"), rows[:MOST])
    if len(rows) > MOST:
        print_line(f"and {len(rows) - MOST} more (--json has all)")
    clean = "nothing contradicts itself" if path is None else "codes, scales and list are the run's"
    if not rows:
        print_line(f"clean: {clean}")
    for note in report.notes:
        print_line(f"  {note}")


def _engines(text: str | None) -> tuple[str, ...]:
    found = tuple(name.strip() for name in text.split(",")) if text else ()
    for name in found:
        if name not in ENGINES:
            raise UnknownName("engine for serving", name, ENGINES)
    return found


def _rows(found: Sequence[Difference]) -> list[tuple[str, str, str]]:
    """One row for each thing that is wrong in the same way, with the worst place first."""
    groups: dict[tuple[str, str], list[Difference]] = {}
    for one in found:
        cause = one.text.partition(" differ: ")
        groups.setdefault((one.kind, cause[2] or one.text), []).append(one)
    rows = []
    for members in groups.values():
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        error = members[0].error
        rows.append((f"{members[0].name}{more}", members[0].text, f"{error:.2%}" if 0 < error < float("inf") else ""))
    return rows


MOST_LINEARS = 4
"""Number of linears that are printed."""


def _print_mismatch(path: Path, folder: Path, found: Mismatch) -> None:
    print_line(f"{path} against {folder}: {found.tokens:,} tokens, training's loss {found.loss:.4f} ({found.recipe})")
    rows = [
        (one.name, f"{one.mean:.2e}", f"{one.k3:.2e}", f"{one.greedy:.2%}", f"{one.loss:.4f}")
        for one in found.distances
    ]
    print_table(("served", "mean |d log p|", "k3", "greedy tokens that change", "loss"), rows)
    print_line()
    worst = [(name, f"{error:.2e}") for name, error in list(found.linears.items())[:MOST_LINEARS]]
    print_table(("linear", "its output's error on training's inputs"), worst)


class MismatchVerb:
    """`mpbridge mismatch RUN DIR --tokens FILE`: log-probabilities under training's numerics and under those of a served folder, emulated on this CPU."""

    SUMMARY = "measure how far a served folder's log-probabilities are from training's"
    ARGUMENTS = (
        arg("run RUN", "a checkpoint, or a folder of them"),
        arg("folder DIR", "a folder of served weights of the same model"),
        arg("--tokens FILE", "a text, tokenized as the run's data", Path, required=True),
        arg("--sequences N", "number of sequences (default: 8)", int, least=1, default=8),
        JSON,
    )

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Prints the distances."""
        from mpbridge.training.serving.mismatch import mismatch

        try:
            with regular(args.tokens) as stream:
                text = stream.read(LIMITS["text"].size).decode("utf-8", errors="replace")
        except OSError as error:
            raise BadValue(f"{args.tokens} cannot be read: {why(error)}") from None
        path = locate(Path(args.run.removeprefix("ckpt:")))
        folder = folder_of(f"{PREFIX}{args.folder.removeprefix(PREFIX)}")
        found = mismatch(path, folder, text, sequences=args.sequences)
        data = {"run": str(path), "folder": str(folder)} | dataclasses.asdict(found)
        answer(args, data, lambda: _print_mismatch(path, folder, found))
        return 0
