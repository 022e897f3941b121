"""`mpbridge recommend`: ranks the recipes that are valid for a model on a machine, with reasons."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from mpbridge.cli._target import TARGET, left_out, on_target, target
from mpbridge.cli.options import JSON, PRICE, RUN, arg, container
from mpbridge.cli.text import answer, print_line, print_table
from mpbridge.common.errors import BadValue, MpbridgeError
from mpbridge.common.tables import size
from mpbridge.planning.advice import ORDERS, Advice, advise, decides, order, with_ties
from mpbridge.planning.estimate.predict import timing
from mpbridge.planning.memory.compare import REFERENCE
from mpbridge.precision.registry import recipe, recipes

if TYPE_CHECKING:
    from mpbridge.cli._target import TargetMachine
    from mpbridge.settings.container import ConfigContainer

SUMMARY = "rank the valid recipes for a model on a machine, with reasons"
ARGUMENTS = (
    *RUN, *TARGET,
    arg("--by", "order of the valid and fitting recipes; error: of one step's gradient, as certify predicts it", ORDERS, default="status"),
    PRICE,
    arg("--runs DIR,DIR", "folders of your runs: a measured step time replaces the prediction for the same recipe"),
    JSON,
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Prints the ranking. Returns 1 if no recipe is valid and fits."""
    where = target(args)
    if args.recipe:
        raise BadValue(
            f"--recipe {recipe(args.recipe).name}: recommend compares all recipes, omit it (mpbridge check checks one)"
        )
    base = container(args)
    world = args.world_size or base.smallest_world()
    made, omitted = _advice(args, where, base, world)
    if len({advice.reason for advice in made}) == 1 and not made[0].legal:
        # faults of the sizes or the model, not of a recipe
        raise BadValue(made[0].reason)
    for folder in args.runs.split(",") if args.runs else ():
        made = [_measured(advice, Path(folder)) for advice in made]
    ranked = sorted(with_ties(made), key=lambda advice: order(advice, args.by))
    ties = decides(ranked)
    there = {"machine": where.machine.name, "versions": dataclasses.asdict(where.versions)}
    data = {"target": there, "recipes": [dataclasses.asdict(one) for one in ranked], "left_out": omitted, "ties": ties}
    answer(args, data, lambda: _print(where, ranked, ties, omitted, args.price))
    return 0 if any(advice.legal and advice.fits for advice in ranked) else 1


def _advice(
    args: argparse.Namespace, where: TargetMachine, base: ConfigContainer, world: int
) -> tuple[list[Advice], list[str]]:
    """(advice on each recipe, what memory and time omit)."""
    reference = None
    made = []
    omitted: dict[str, None] = {}
    for name in (REFERENCE, *(other for other in recipes if other != REFERENCE)):
        entry = recipes[name]
        try:
            # the file is read once; each recipe in turn replaces its precision section
            run = on_target(base, world, where, mixed_precision=name, engine=args.engine or entry.engine)
            one = where.outlook(run)
            reference = one.memory.needed if name == REFERENCE else reference
            omitted |= left_out(one.facts)
            advice = advise(entry, one, reference=reference)
            if args.by == "error" and advice.legal:
                from mpbridge.numerics.certificates.certificate import gradient_error  # loads torch

                advice = dataclasses.replace(advice, error=gradient_error(one.policy))
            made.append(advice)
        except MpbridgeError as error:
            made.append(Advice(recipe=name, status=entry.status, legal=False, reason=error.line))
    return made, list(omitted)


def _measured(advice: Advice, folder: Path) -> Advice:
    """Adds the measured step time of a run with that recipe."""
    found = timing(folder)
    if found.recipe != advice.recipe or not advice.legal:
        return advice
    hours = 1e9 / found.tokens_per_second / 3600
    return dataclasses.replace(
        advice, seconds=found.seconds, band=0.0, one_sided=False, speed_known=f"measured in {folder}", hours=hours
    )


def _speed(advice: Advice, price: float | None) -> tuple[str, str]:
    if advice.seconds is None or advice.hours is None:
        return "not priced", ""
    off = f" {'+' if advice.one_sided else '+-'} {advice.band:.0%}" if advice.band else ""
    cost = f" ({price * advice.hours:,.0f})" if price is not None else ""
    return f"{advice.seconds:.3g} s{off}, {advice.speed_known}", f"{advice.hours:,.0f}{cost}"


def _print(where: TargetMachine, order: list[Advice], ties: list[str], omitted: list[str], price: float | None) -> None:
    print_line(f"target {where.line()}", "")
    legal = [advice for advice in order if advice.legal]
    for fits, title in ((True, "valid and fit, in order"), (False, "valid, but do not fit")):
        rows = [
            (
                f"{place}{a.mark}",
                a.recipe,
                a.status,
                _memory(a),
                *_speed(a, price),
                *([] if a.error is None else [f"{a.error:.2g}"]),
                a.reason,
            )
            for place, a in enumerate(legal, start=1)
            if a.fits is fits
        ]
        if fits and not rows:
            print_line(
                "valid and fit: none in this layout (mpbridge check and mpbridge layouts name layouts that do)", ""
            )
        if rows:
            error = ("gradient's error",) if any(a.error is not None for a in legal) else ()
            columns = ("", "recipe", "status", "memory", "step", "GPU hours per 1e9 tokens", *error, "why")
            print_table(columns, rows, title=title)
            print_line()
    for tie in ties:
        print_line(tie)
    print_line(
        "memory: states and estimated activations of the fullest GPU, compared with bf16_mixed on the megatron-core engine"
    )
    print_line(
        "status: validated: trained to a known loss (mpbridge show names the source); GEMMs' peak: dense, by the vendor's table, and the end-to-end gain is smaller"
    )
    others = [(advice.recipe, advice.reason) for advice in order if not advice.legal]
    if others:
        print_line()
        print_table(("recipe", "why not"), others, title="not valid here")
    for words in omitted:
        print_line(f"left out: {words}")


def _memory(advice: Advice) -> str:
    if advice.bytes is None:
        return ""
    share = f"{advice.relative - 1:+.0%}" if advice.relative else ""
    return f"{size(advice.bytes)} ({share}){'' if advice.fit == 'fits' else f', {advice.fit}'}"
