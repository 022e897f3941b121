"""`mpbridge certify`: what a recipe's rounding does to operands, GEMMs and the optimizer, without training."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpbridge.cli.options import container
from mpbridge.cli.text import print_json, print_line, print_table
from mpbridge.common.errors import BadValue

if TYPE_CHECKING:
    from mpbridge.numerics.certificates.certificate import Certificate

SUMMARY = "compute what a recipe's rounding does to operands, GEMMs and the optimizer, with a bound beside each figure"
VARIANT_NAMES = ("no-sr", "no-rht", "1d-weights", "4over6", "scale-up", "headroom", "ms-eden", "ms-eden-fixed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE",
        help="a name (mpbridge list), a YAML file, package.module:function or file.py:function (default: the configuration's)",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that override the file's, such as optimizer.lr=3e-4"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="the run whose learning rates, weights and batches count (default: gpt_tiny)"
    )
    parser.add_argument(
        "--te", metavar="X.Y", help="the Transformer Engine release whose rules to follow (default: 2.11)"
    )
    parser.add_argument(
        "--tensors",
        type=Path,
        metavar="RUN|FILE",
        help="your own: a safetensors file with x, w and dy, or weights; or a run's folder, whose last measured step counts",
    )
    parser.add_argument(
        "--variant",
        choices=VARIANT_NAMES,
        metavar="VARIANT",
        help=f"a change of NVFP4, some of which no stack offers yet: {', '.join(VARIANT_NAMES)}",
    )
    parser.add_argument("--against", metavar="OTHER", help="another recipe, or a variant of this one, side by side")
    parser.add_argument("--out", type=Path, metavar="PAGE", help="write a page: a self-contained HTML file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the certificate."""
    from mpbridge.common.pages.document import writable, write
    from mpbridge.common.report.console import without_chatter

    without_chatter()
    if args.out is not None:
        writable(args.out)
    if args.recipe is not None and "=" in args.recipe:
        args.recipe, args.overrides = None, [args.recipe, *args.overrides]
    made = [_certificate(args, args.recipe, args.variant)]
    if args.against is not None:
        variant = args.against if args.against in VARIANT_NAMES else None
        made.append(_certificate(args, args.recipe if variant else args.against, variant))
    if args.json:
        data = made[0].as_data()
        print_json(data if len(made) == 1 else {**data, "against": made[1].as_data()})
    else:
        _print(made)
    if args.out is not None:
        from mpbridge.numerics.certificates.page import certificate_page

        sys.stdout.flush()  # print the answer first, in case the page cannot be written
        write(args.out, certificate_page(made).html())
        if not args.json:
            print_line(f"\npage: {args.out}")
    return 0


def _certificate(args: argparse.Namespace, recipe: str | None, variant: str | None) -> Certificate:
    from mpbridge.numerics.certificates.certificate import certificate
    from mpbridge.numerics.certificates.expected import VARIANTS
    from mpbridge.numerics.rules import release_of
    from mpbridge.training.certified import OwnTensors, own_tensors, training_of

    # the shipped model is made deep enough for the edge layers of every recipe; no figure depends on the depth
    deep = (
        []
        if args.config or any(one.startswith("model.num_layers=") for one in args.overrides)
        else ["model.num_layers=16"]
    )
    overrides = [*deep, *args.overrides]
    asked = argparse.Namespace(recipe=recipe, config=args.config, engine=None, emulate=None, overrides=overrides)
    box = container(asked)
    made = box.resolved(box.smallest_world())
    if variant is not None and not any(quant.scaling == "nvfp4" for quant in made.policy.quants):
        raise BadValue(
            f"variant {variant} of {made.recipe}: variants are of NVFP4 (expected a recipe with nvfp4 scaling, such as bf16_with_nvfp4_mixed)"
        )
    own = OwnTensors(linears={}) if args.tensors is None else own_tensors(args.tensors)
    return certificate(
        made.recipe,
        made.policy,
        training_of(made, whole=True, sigma=own.sigma),
        release=release_of(args.te),
        variant=None if variant is None else VARIANTS[variant],
        own=own.linears,
        beside=own.rows,
    )


def _print(made: list[Certificate]) -> None:
    for one in made:
        name = one.recipe + (f" with {one.variant.name}" if one.variant else "")
        print_line(f"{name}, Transformer Engine {one.te}'s rules, {one.seconds:.0f} s")
        for sentence in one.sentences.values():
            print_line(f"{sentence[0].upper()}{sentence[1:]}.", indent="  ")
        print_line()
    for part, title in PARTS.items():
        columns, rows = (wide if part in ("operand", "gemm") else table_of)(made, part)
        if rows:
            print_table(columns, rows, title=title)
            print_line()


PARTS = {
    "operand": "operands",
    "gemm": "GEMMs: bits are -log2 of the relative error",
    "second pass": "quantized a second time",
    "optimizer": "optimizer",
    "attention": "attention and log-probabilities",
}


def wide(made: list[Certificate], part: str) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Like `table_of`, with a column for each quantity; a bound that holds stands behind its number."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for one in made:
        for row in one.rows:
            if row.part == part:
                bound = "" if row.bound is None else f" (<= {row.bound:.3g})"
                found.setdefault((row.tensor, row.where), {}).setdefault(row.quantity, []).append(
                    f"{row.value:.4g}{bound}"
                )
    quantities = list(dict.fromkeys(name for cells in found.values() for name in cells))
    rows = [(*key, *(" / ".join(cells.get(name, [])) for name in quantities)) for key, cells in found.items()]
    return ("tensor", "where", *quantities), rows


def table_of(made: list[Certificate], part: str) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """(columns, rows) of one part; the same row of several certificates side by side."""
    found: dict[tuple[str, str, str], dict[int, Any]] = {}
    for index, one in enumerate(made):
        for row in one.rows:
            if row.part == part:
                found.setdefault((row.tensor, row.where, row.quantity), {})[index] = row
    names = [one.variant.name if one.variant else one.recipe for one in made]
    values = ("value",) if len(made) == 1 else tuple(names)
    rows = []
    for (tensor, where, quantity), cells in found.items():
        first = next(iter(cells.values()))
        texts = [_text(cells[index]) if index in cells else "" for index in range(len(made))]
        bound = "" if first.bound is None else f"{first.bound:.3g}"
        rows.append((tensor, where, quantity, *texts, bound, first.derivation, first.condition))
    return ("tensor", "where", "quantity", *values, "bound", "how", "when"), rows


def _text(row: Any) -> str:
    return f"{row.value:.4g}" + (f" +- {row.ci95:.2g}" if row.ci95 else "")
