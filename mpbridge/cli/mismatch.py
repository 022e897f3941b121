"""`mpbridge mismatch RUN DIR --tokens FILE`: log-probabilities under training's numerics and under those of a served folder, emulated on this CPU."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from mpbridge.cli.options import JSON, arg
from mpbridge.cli.text import answer, print_line, print_table
from mpbridge.common.errors import BadValue
from mpbridge.common.files import LIMITS, regular, why
from mpbridge.settings.huggingface.folder import PREFIX, folder_of

if TYPE_CHECKING:
    from mpbridge.training.serving.mismatch import Mismatch

SUMMARY = "measure how far a served folder's log-probabilities are from training's"
MOST = 4
"""Number of linears that are printed."""
ARGUMENTS = (
    arg("run RUN", "a checkpoint, or a folder of them"),
    arg("folder DIR", "a folder of served weights of the same model"),
    arg("--tokens FILE", "a text, tokenized as the run's data", Path, required=True),
    arg("--sequences N", "number of sequences (default: 8)", int, least=1, default=8),
    JSON,
)


def run(args: argparse.Namespace) -> int:
    """Prints the distances."""
    from mpbridge.training.checkpoint.store import locate
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
    answer(args, data, lambda: _print(path, folder, found))
    return 0


def _print(path: Path, folder: Path, found: Mismatch) -> None:
    print_line(f"{path} against {folder}: {found.tokens:,} tokens, training's loss {found.loss:.4f}")
    rows = [
        (one.name, f"{one.mean:.2e}", f"{one.k3:.2e}", f"{one.greedy:.2%}", f"{one.loss:.4f}")
        for one in found.distances
    ]
    print_table(("served", "mean |d log p|", "k3", "greedy tokens that change", "loss"), rows)
    print_line()
    worst = [(name, f"{error:.2e}") for name, error in list(found.linears.items())[:MOST]]
    print_table(("linear", "its output's error on training's inputs"), worst)
