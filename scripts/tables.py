"""Tables of the README and the docs, generated from the code: `python scripts/tables.py` rewrites them, `--check` says which are out of date.

A page asks for a table with a pair of lines, and what stands between them is generated:

    <!-- table:NAME -->
    <!-- end of table -->

A new table is a function here that returns Markdown, under @table("NAME").
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs in a checkout where nothing is installed

BLOCK = re.compile(r"(<!-- table:(?P<name>[\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
TABLES: dict[str, Callable[[], str]] = {}


def table(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    def enter(make: Callable[[], str]) -> Callable[[], str]:
        if name in TABLES:
            raise SystemExit(f"two tables named {name!r}")
        TABLES[name] = make
        return make

    return enter


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )


@table("recipes")
def recipe_table() -> str:
    from mpbridge.precision.recipes import BUILT_IN

    def needs(arch: tuple[int, int] | None) -> str:
        return "any machine" if arch is None else f"compute capability {arch[0]}.{arch[1]}"

    rows = [
        (
            f"`{r.name}`",
            r.summary,
            needs(r.needs),
            f"{r.status}{f', engine {r.engine}' if r.engine else ''}",
            ", ".join(f"`{a}`" for a in r.aliases),
        )
        for r in BUILT_IN
    ]
    return markdown(("recipe", "what it does", "needs", "status", "also called"), rows)


@table("sources")
def source_table() -> str:
    from mpbridge.precision.recipes import BUILT_IN

    return markdown(
        ("recipe", "values and evidence", "what it wants"),
        [(f"`{r.name}`", r.source, "; ".join(r.hints)) for r in BUILT_IN],
    )


@table("differences")
def difference_table() -> str:
    import json

    from mpbridge.precision.recipes import BUILT_IN, DIFFERENCES

    reference = json.loads((ROOT / "tests" / "golden" / "recipes.json").read_text(encoding="utf-8"))["reference"]
    ours = {entry.name: entry.make().stored() for entry in BUILT_IN}

    def said(value: object) -> str:
        return f"`{json.dumps(value)}`"

    rows = [
        (
            f"`{name}`",
            f"`{field}`",
            said((reference["class_defaults"] | reference["recipes"][name])[field]),
            said(ours[name][field]),
            reason,
        )
        for (name, field), reason in DIFFERENCES.items()
    ]
    return markdown(("recipe", "field", "Megatron Bridge", "mpbridge", "why"), rows)


@table("fields")
def field_table() -> str:
    """What a recipe decides on megatron-core's configs."""
    from mpbridge.megatron_spec.fields import TABLE

    rows = [
        (
            f"`{row.target}.{row.field}`",
            row.why,
            f"`mixed_precision.{row.knob}`" if row.knob else "another recipe",
            row.kind,
        )
        for row in TABLE
    ]
    return markdown(("field", "what it is", "what changes it", "kind"), rows)


@table("left-alone")
def left_alone_table() -> str:
    """Precision fields that no recipe decides."""
    from mpbridge.megatron_spec.classes import PROCESS_WIDE, USERS_OWN

    rows = [
        (f"`{'.'.join(key)}`", why, kind)
        for kind, which in (("yours", USERS_OWN), ("process-wide", PROCESS_WIDE))
        for key, why in which.items()
    ]
    return markdown(("field", "what it does", "whose"), rows)


@table("recipe-machines")
def recipe_machine_table() -> str:
    """Which recipe runs on which GPU, with the versions that a target is assumed to have."""
    from mpbridge.hardware.capability import ASSUMED, can_run
    from mpbridge.hardware.machines import machines
    from mpbridge.precision.recipes import BUILT_IN
    from mpbridge.precision.resolve import resolve

    kinds: dict[tuple[str, ...], list[str]] = {}
    for row in machines.values():
        answers = [can_run(resolve(entry.make()), row, ASSUMED) for entry in BUILT_IN]
        words = {"native": "yes", "emulated": "emulated", "no": "no"}
        kinds.setdefault(tuple(words[a.how] if a.proven else "unproven" for a in answers), []).append(row.name)
    columns = ("recipe", *(", ".join(names) for names in kinds.values()))
    rows = [(f"`{entry.name}`", *(column[i] for column in kinds)) for i, entry in enumerate(BUILT_IN)]
    return markdown(columns, rows)


@table("machines")
def machine_table() -> str:
    """The GPUs that `--target` knows."""
    from mpbridge.hardware.machines import machines

    formats = ("fp32", "bf16", "fp16", "fp8", "fp4")
    rows = []
    for row in machines.values():
        peaks = dict(row.peak)
        speeds = [f"{peaks[name]:g}" if name in peaks else "" for name in formats]
        size = f"{row.memory_bytes / 2**30:.1f}" if row.gpu else ""
        links = (
            (f"{row.nvlink / 1e9:g}", str(row.domain), f"{row.network / 1e9:g}" if row.network else "")
            if row.gpu
            else ("", "", "")
        )
        rows.append(
            (
                row.name,
                row.sm,
                size,
                f"{row.bandwidth / 1e9:g}" if row.gpu else "",
                *speeds,
                *links,
                row.source + (f" ({row.note})" if row.note else ""),
            )
        )
    return markdown(
        (
            "machine",
            "architecture",
            "usable GiB",
            "GB/s",
            *(f"{name} TFLOP/s" for name in formats),
            "link GB/s",
            "domain",
            "network GB/s",
            "source",
        ),
        rows,
    )


@table("rules")
def rule_table() -> str:
    """Every rule of `mpbridge check`."""
    from mpbridge.rules.table import rules

    rows = [
        (f"`{r.id}`", r.severity, r.expected, r.cure, " and ".join(map(str, r.holds)) or "all", r.source)
        for r in rules()
    ]
    return markdown(("rule", "severity", "expects", "cure", "versions", "source"), rows)


@table("bytes")
def bytes_table() -> str:
    """Bytes a parameter of each recipe, as `mpbridge memory` predicts them for a 70B model's shape."""
    from mpbridge.precision.recipes import BUILT_IN
    from mpbridge.rules.cards import card

    cards = [card(entry.name) for entry in BUILT_IN]
    rows = [(f"`{c.recipe}`", c.compute, c.stored, f"{c.bytes_alone:.2f}", f"{c.bytes_shared:.2f}") for c in cards]
    return markdown(("recipe", "compute", "kept", "bytes a parameter, 1 GPU", "8 GPUs"), rows)


def filled(text: str, page: str) -> str:
    def fill(found: re.Match[str]) -> str:
        if found["name"] not in TABLES:
            raise SystemExit(f"{page}: no table named {found['name']!r} (known: {', '.join(TABLES)})")
        return f"{found[1]}{TABLES[found['name']]()}\n{found[3]}"

    return BLOCK.sub(fill, text)


def pages() -> list[Path]:
    return [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if path.is_file()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when a table is out of date")
    parser.add_argument("--print", metavar="NAME", dest="shown", help="print one table")
    parser.add_argument("page", nargs="*", type=Path, help="default: README.md and docs/*.md")
    args = parser.parse_args(arguments)
    if args.shown:
        if args.shown not in TABLES:
            parser.error(f"no table named {args.shown!r} (known: {', '.join(TABLES)})")
        print(TABLES[args.shown]())
        return 0
    stale = []
    for page in args.page or pages():
        text = page.read_text(encoding="utf-8")
        new = filled(text, page.name)
        if new != text:
            stale.append(page.name)
            if not args.check:
                page.write_text(new, encoding="utf-8")
    if stale:
        print(f"{'out of date' if args.check else 'rewritten'}: {', '.join(stale)}")
    return 1 if stale and args.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
