"""`mpbridge words bf16-mixed`: shows what one word means in every stack."""

from __future__ import annotations

import argparse

from mpbridge.cli.options import JSON, arg
from mpbridge.cli.text import answer, print_line, print_table, record
from mpbridge.interop.stacks.meaning import rows
from mpbridge.interop.stacks.words import TABLE, meanings

SUMMARY = "show what one word means in every stack"
_SHOWN = ("storage", "compute", "autocast", "main", "wire", "accumulator", "exp_avg", "bytes")
_HEADS = ("stored", "forward", "autocast", "main weights", "wire", "accumulator", "moments", "bytes")
_FLAGS = sorted({word for row in TABLE for spelling in row.words for word in spelling.split() if word.startswith("--")})
ARGUMENTS = (
    arg("word WORD", "in any stack's spelling (default: all known words)", nargs="?"),
    *(arg(option, argparse.SUPPRESS, action="append_const", dest="flags", const=option) for option in _FLAGS),
    JSON,
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Prints a row for each stack and context."""
    asked = [*(args.flags or ()), *([args.word] if args.word is not None else ())]
    if not asked:
        known = sorted({word for row in TABLE for word in row.words})
        answer(args, {"words": known}, lambda: print_line(*known))
        return 0
    found = meanings(" ".join(asked))
    table = [(row, rows(row.meaning)) for row in found]
    said = [record(row, "stack", "where", "source", **shown) for row, shown in table]
    # no column for quantization if the word never quantizes
    more = ("quantization",) if any(shown["quantization"] != "none" for _, shown in table) else ()
    heads = ("stack", "where", *_HEADS, *(("quantized linears",) if more else ()))
    cells = [(row.stack, row.where, *(shown[name] for name in (*_SHOWN, *more))) for row, shown in table]
    answer(args, {"words": asked, "meanings": said}, lambda: print_table(heads, cells))
    return 0
