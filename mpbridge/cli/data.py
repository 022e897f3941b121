"""`mpbridge data prepare|inspect`: packs a corpus into megatron-core's .bin/.idx, and describes a pair, a corpus or a tokenizer."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from mpbridge.cli.options import JSON, arg
from mpbridge.cli.text import answer, print_line, print_table, print_whole, record
from mpbridge.common.errors import BadValue, Contradiction
from mpbridge.common.report.progress import bar
from mpbridge.settings.huggingface.tokenizers import BYTE, BYTE_VOCABULARY, is_factory, tokenizer_files
from mpbridge.training.admission import place_fault
from mpbridge.training.data.sources import fetch, find

SUMMARY = "pack a corpus into .bin/.idx, or describe one"
ARGUMENTS = (
    arg("action", "prepare: pack; inspect: describe", ("prepare", "inspect")),
    arg("sources SOURCE", "text and JSON lines, folders and globs of them, 'stdlib'; inspect: .bin/.idx prefixes too", nargs="*"),
    arg("--out PREFIX", "prepare: write PREFIX_<key>_document.bin and .idx; by default into the cache", Path),
    arg("--keys KEY", "fields with text, one output each", nargs="+", default=["text"]),
    arg("--tokenizer NAME", "as data.tokenizer: byte (default), a folder, a file, a repository's id"),
    arg("--end-of-text TOKEN", "the token after each document (default: the tokenizer's own)"),
    arg("--cache DIR", "cache folder (default: the user's)", Path),
    JSON,
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Packs or inspects. Returns 0."""
    {"prepare": _prepare, "inspect": _inspect}[args.action](args)
    return 0


def _prepare(args: argparse.Namespace) -> None:
    from mpbridge.training.data.prepare import cache_folder, prepare, write_pairs

    _refuse_bad(args)
    name = args.tokenizer or BYTE
    fetch(name)
    sources = find("stdlib" if args.sources == ["stdlib"] else args.sources)
    if sources.prefixes:
        raise BadValue(f"{sources.prefixes[0]}.bin/.idx is packed already: nothing to prepare")
    with bar("packed", quiet=args.json) as told:
        done = prepare(
            sources.files, cache=cache_folder(args.cache), tokenizer_name=name, end=args.end_of_text, keys=args.keys, told=told
        )  # fmt: skip
    prefixes = list(done.prefixes)
    if args.out:
        write_pairs(done, args.out)
        prefixes = [str(args.out.with_name(f"{args.out.name}_{key}_document")) for key in done.keys]
    if name != BYTE and not is_factory(name) and not args.json:
        print_line(tokenizer_files(name, args.end_of_text).end_line())
    lines = (done.line() + (" (prepared before)" if done.cached else ""), *prefixes)
    facts = record(done, "documents", "tokens", "skipped", "cached", prefixes=prefixes)
    answer(args, facts, lambda: print_whole("\n".join(lines)))


def _refuse_bad(args: argparse.Namespace) -> None:
    """Raises BadValue or Contradiction for arguments that cannot work, before anything is read."""
    if not args.sources:
        raise BadValue("data prepare: no SOURCE; give files, folders, globs or stdlib")
    places = (("--out", args.out and args.out.parent), ("--cache", args.cache))
    faults = [fault for option, place in places if place and (fault := place_fault(option, place))]
    if faults:
        raise Contradiction(faults, subject="the output cannot be written")
    if args.out:  # a folder's mode does not tell for /proc or a full disk
        place = next(one for one in args.out.expanduser().absolute().parents if one.exists())
        try:
            tempfile.TemporaryFile(dir=place).close()
        except OSError as error:
            raise BadValue(f"--out {args.out}: no file can be written in {place} ({error.strerror})") from None


def _inspect(args: argparse.Namespace) -> None:
    if not args.sources and not args.tokenizer:
        raise BadValue("data inspect: nothing to inspect; give a SOURCE, or --tokenizer NAME")
    found: dict[str, Any] = {}
    if args.tokenizer:
        found["tokenizer"] = _tokenizer(args)
    if args.sources:
        sources = find("stdlib" if args.sources == ["stdlib"] else args.sources)
        if sources.prefixes:
            from mpbridge.training.data.prepare import pair

            found["pairs"] = [pair(prefix) for prefix in sources.prefixes]
        else:
            kinds: dict[str, list[int]] = {}
            for path in sources.files:
                kinds.setdefault(path.suffix or "no ending", []).append(path.stat().st_size)
            rows = ((kind, len(sizes), sum(sizes)) for kind, sizes in sorted(kinds.items()))
            found["files"] = [dict(zip(("kind", "files", "bytes"), row, strict=True)) for row in rows]
    answer(args, found, lambda: _show(found))


def _tokenizer(args: argparse.Namespace) -> dict[str, Any]:
    if args.tokenizer == BYTE:
        return {"name": BYTE, "tokens": BYTE_VOCABULARY, "end of text": 256, "padding": 257}
    if is_factory(args.tokenizer):
        raise BadValue(f"--tokenizer {args.tokenizer}: this tokenizer is code, which inspect does not run")
    fetch(args.tokenizer)
    files = tokenizer_files(args.tokenizer, args.end_of_text)
    found: dict[str, Any] = {"name": args.tokenizer, "file": str(files.file), "tokens": files.size}
    if files.end is None:
        found["end of text"] = f"not said{f' ({files.ends_by})' if files.ends_by else ''}: set data.end_of_text"
    else:
        found |= {"end of text": files.end, "token": files.end_token, "as said by": files.ends_by.removeprefix("by ")}
    if files.pad is None:
        return found | {"padding": f"none{f' ({files.pad_by})' if files.pad_by else ''}"}
    return found | {"padding": files.pad, "padding as said by": files.pad_by}


def _show(found: dict[str, Any]) -> None:
    if "tokenizer" in found:
        rows = [(key, _text(value)) for key, value in found["tokenizer"].items() if key != "name"]
        print_table(("tokenizer", found["tokenizer"]["name"]), rows)
    for facts in found.get("pairs", ()):
        rows = [(key.replace("_", " "), _text(value)) for key, value in facts.items() if key != "prefix"]
        print_table((Path(facts["prefix"]).name, ""), rows)
    if "files" in found:
        print_table(("kind", "files", "bytes"), [tuple(map(_text, row.values())) for row in found["files"]])


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
