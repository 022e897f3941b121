"""`mpbridge words bf16-mixed`: shows what one word means in every stack."""

from __future__ import annotations

import argparse

from mpbridge.cli.options import JSON, arg
from mpbridge.cli.text import print_json, print_line, print_table
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
        print_json({"words": known}) if args.json else print_line("\n".join(known))
        return 0
    found = meanings(" ".join(asked))
    table = [(row, rows(row.meaning)) for row in found]
    if args.json:
        said = [{"stack": row.stack, "where": row.where, "source": row.source, **shown} for row, shown in table]
        print_json({"words": asked, "meanings": said})
        return 0
    # no column for quantization if the word never quantizes
    more = ("quantization",) if any(shown["quantization"] != "none" for _, shown in table) else ()
    heads = ("stack", "where", *_HEADS, *(("quantized linears",) if more else ()))
    print_table(heads, [(row.stack, row.where, *(shown[name] for name in (*_SHOWN, *more))) for row, shown in table])
    return 0
