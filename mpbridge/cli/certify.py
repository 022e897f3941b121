"""`mpbridge certify`: what a recipe's rounding does to operands, GEMMs and the optimizer, without training."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpbridge.cli.options import JSON, arg, container
from mpbridge.cli.text import answer, paged, print_line, print_table
from mpbridge.common.errors import BadValue
from mpbridge.common.transformer_engine import tried
from mpbridge.planning.certificates import VARIANTS, Row
from mpbridge.settings.container import Run
from mpbridge.training.certified import OwnTensors, own_tensors, training_of

if TYPE_CHECKING:
    from mpbridge.numerics.certificates.certificate import Certificate

SUMMARY = "compute what a recipe's rounding does to operands, GEMMs and the optimizer, with a bound beside each figure"
ARGUMENTS = (
    arg("recipe RECIPE", "a name (mpbridge list), a YAML file, package.module:function or file.py:function (default: the configuration's)", nargs="?"),
    arg("overrides key=value", "settings that override the file's, such as optimizer.lr=3e-4", nargs="*"),
    arg("--config FILE", "the run whose learning rates, weights and batches count (default: gpt_tiny)"),
    arg("--te X.Y", "the Transformer Engine release whose rules to follow (default: 2.11)"),
    arg("--tensors RUN|FILE", "your own: a safetensors file with x, w and dy, or weights; or a run's folder, whose last measured step counts", Path),
    arg("--variant VARIANT", f"a change of NVFP4, some of which no stack offers yet: {', '.join(VARIANTS)}", tuple(VARIANTS)),
    arg("--against OTHER", "another recipe, or a variant of this one, side by side"),
    arg("--out PAGE", "write a page: a self-contained HTML file", Path),
    JSON,
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Prints the certificate."""
    from mpbridge.numerics.certificates.page import certificate_page

    if args.recipe is not None and "=" in args.recipe:
        args.recipe, args.overrides = None, [args.recipe, *args.overrides]
    made: list[Certificate] = []
    with paged(args, lambda: certificate_page(made)):
        asked = [(args.recipe, args.variant)]
        if args.against is not None:
            variant = args.against if args.against in VARIANTS else None
            asked.append((args.recipe if variant else args.against, variant))
        # both are known to be right before either takes its minute
        resolved = [(_resolved(args, recipe, variant), variant) for recipe, variant in asked]
        made += [_certificate(args, one, variant) for one, variant in resolved]
        data, *other = (one.as_data() for one in made)
        answer(args, data | ({"against": other[0]} if other else {}), lambda: _print(made))
    return 0


def _resolved(args: argparse.Namespace, recipe: str | None, variant: str | None) -> Run:
    from mpbridge.numerics.scales import release_of

    # the shipped model is made deep enough for the edge layers of every recipe; no figure depends on the depth
    deep = [] if args.config else ["model.num_layers=16"]
    asked = argparse.Namespace(recipe=recipe, config=args.config, engine=None, emulate=None, overrides=[*deep, *args.overrides])  # fmt: skip
    box = container(asked)
    made = box.resolved(box.smallest_world())
    if variant is not None and not any(quant.scaling == "nvfp4" for quant in made.policy.quants):
        raise BadValue(
            f"variant {variant} of {made.recipe}: variants are of NVFP4 (expected a recipe with nvfp4 scaling, such as bf16_with_nvfp4_mixed)"
        )
    if args.te is not None and release_of(args.te):  # names a text that is none first
        tried(args.te)
    return made


def _certificate(args: argparse.Namespace, made: Run, variant: str | None) -> Certificate:
    from mpbridge.numerics.certificates.certificate import certificate
    from mpbridge.numerics.scales import release_of

    own = OwnTensors(linears={}) if args.tensors is None else own_tensors(args.tensors)
    found = certificate(
        made.recipe,
        made.policy,
        training_of(made, whole=True, sigma=own.sigma),
        release=release_of(args.te),
        variant=None if variant is None else VARIANTS[variant],
        own=own.linears,
        beside=own.rows,
    )
    if len(made.stages) < 2:
        return found
    only = f"only the first of {len(made.stages)} recipes is certified, {made.recipe} (named as an argument instead of the list, another one is)"
    return dataclasses.replace(found, sentences={**found.sentences, "schedule": only})


def _print(made: list[Certificate]) -> None:
    for one in made:
        print_line(f"{_name(one)}, Transformer Engine {one.te}'s rules, {one.seconds:.0f} s of one core")
        for sentence in one.sentences.values():
            print_line(f"{sentence[0].upper()}{sentence[1:]}.", indent="  ")
        print_line()
    print_line(LEGEND)
    print_line(f"Two numbers: {_name(made[0])} / {_name(made[1])}." if len(made) > 1 else "")
    for part, title in PARTS.items():
        for measured in (False, True):
            columns, rows = table_of(made, part, measured)
            if rows:
                print_table(columns, rows, title=title)
                print_line()


def _name(one: Certificate) -> str:
    return one.recipe + (f" with {one.variant.name}" if one.variant else "")


PARTS = {
    "operand": "operands", "gemm": "GEMMs: bits are -log2 of the relative error",
    "second pass": "quantized a second time", "optimizer": "optimizer", "attention": "attention and log-probabilities",
}  # fmt: skip
LEGEND = (
    "+-: measured, half of the 95 % interval over independent tensors (Student's t). Without: exact, a sum over all outcomes of the rounding. "
    "<=: a bound for every tensor whose scales are normal numbers."
)


def table_of(made: list[Certificate], part: str, measured: bool) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """(columns, rows) of one part; of two certificates `first / second`, `-` for a figure that one lacks.

    measured: the figures of tensors, with a column for each quantity; else those that depend on none, with a row for each and its condition.
    """
    cells: dict[tuple[str, str], dict[str, list[str]]] = {}
    notes: dict[tuple[str, str], tuple[str, str]] = {}
    for index, one in enumerate(made):
        for row in one.rows:
            if row.part != part or bool(row.tensor) is not measured:
                continue
            key, column = ((row.tensor, row.where), row.quantity) if measured else ((row.where, row.quantity), "value")
            cells.setdefault(key, {}).setdefault(column, ["-"] * len(made))[index] = _text(row)
            notes[key] = (row.derivation, row.condition)
    columns = list(dict.fromkeys(name for row in cells.values() for name in row))
    rows = [
        (*key, *(" / ".join(row.get(name, ())) for name in columns), *(() if measured else notes[key]))
        for key, row in cells.items()
    ]
    return (("tensor", "where", *columns) if measured else ("where", "quantity", *columns, "how", "when")), rows


def _text(row: Row) -> str:
    interval = f" +- {row.ci95:.1g}" if row.ci95 else ""
    return f"{row.value:.4g}{interval}" + ("" if row.bound is None else f" (<= {row.bound:.3g})")
