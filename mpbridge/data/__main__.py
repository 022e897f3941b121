"""`python -m mpbridge.data FILE... --out PREFIX`: preprocessing alone. Exit code 0, or 2 when a file or a worker fails."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mpbridge.data.prepare import cache_folder, prepare, write_pairs
from mpbridge.data.sources import find
from mpbridge.errors import MpbridgeError


def main(argv: Sequence[str] | None = None) -> int:
    """Parses, prepares, prints one line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m mpbridge.data", description="Text or JSON lines to megatron-core's .bin/.idx."
    )
    parser.add_argument(
        "files", nargs="+", help="text files, JSON lines (.jsonl, .ndjson, .json), folders of them, or 'stdlib'"
    )
    parser.add_argument(
        "--out", type=Path, help="write PREFIX_<key>_document.bin and .idx; without it only the cache is filled"
    )
    parser.add_argument("--keys", nargs="+", default=["text"], help="JSON fields that hold text, one output each")
    parser.add_argument("--tokenizer", default="byte", help="'byte' or 'package.module:factory'")
    parser.add_argument("--workers", type=int, help="processes (default: chosen by the size of the input)")
    parser.add_argument("--cache", type=Path, help="cache folder")
    args = parser.parse_args(argv)
    try:
        sources = find("stdlib" if args.files == ["stdlib"] else args.files)
        cache = cache_folder(args.cache)
        done = prepare(sources.files, cache=cache, tokenizer_name=args.tokenizer, keys=args.keys, workers=args.workers)
        if args.out:
            write_pairs(done, args.out)
    except MpbridgeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(done.line())
    print("\n".join(done.prefixes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
