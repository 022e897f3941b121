"""`mpbridge layouts`: lists parallel layouts that are valid and fit on a number of GPUs, fastest first, as lines to paste."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mpbridge.cli._schedule import lost_states, names_of, stage_names
from mpbridge.cli._target import TARGET, TargetMachine, left_batches, left_out, on_target, target
from mpbridge.cli.options import JSON, PRICE, RUN, arg, container, whole
from mpbridge.cli.text import answer, print_line, print_table, record
from mpbridge.common.errors import BadValue, Contradiction, MpbridgeError, Refused, naming
from mpbridge.common.tables import size
from mpbridge.planning.advice import ORDERS, Advice, advise, decides, order, with_ties
from mpbridge.planning.capability import refuse_unless_native
from mpbridge.planning.estimate.candidates import PLACES, line
from mpbridge.planning.estimate.layouts import Layout, search, why_none
from mpbridge.planning.estimate.predict import timing
from mpbridge.planning.memory.by_role import REFERENCE
from mpbridge.planning.memory.layers import unsplit
from mpbridge.planning.outlook import Outlook
from mpbridge.precision.registry import describe, recipe, recipes
from mpbridge.settings.container import ConfigContainer, Run
from mpbridge.settings.other_recipe import with_recipe

_COLUMNS = ("", "recipe", "TP", "PP", "CP", "EP", "micro-batch", "recompute", "optimizer", "step", "tokens/s/GPU", "memory")  # fmt: skip
SUMMARY = "list parallel layouts that are valid and fit, fastest first (predicted), as lines to paste"
ARGUMENTS = (
    *RUN,
    *TARGET,
    arg("--recipes A,B", "more than one recipe (default: the file's)"),
    arg("--most N", "number of layouts per recipe (default: 5)", whole, least=1, default=5),
    JSON,
)


def run(args: argparse.Namespace) -> int:
    """Prints the layouts. Returns 1 if none fits."""
    where = target(args)
    if not where.machine.peak:
        raise BadValue(
            f"{where.machine.name} has no rates in the table: name a --target, or give a --machine-file that `mpbridge calibrate` wrote"
        )
    base = container(args)
    world = args.world_size or base.smallest_world()
    found, faults, omitted = _search(args, base, where, world)
    layouts = [_data(name, one, tuple(omitted)) | {"changes": changes} for name, one, changes in found]
    head = f"{world} x {where.machine.label}: predictions"
    there = {"machine": where.machine.name, "versions": dataclasses.asdict(where.versions)}
    data = {"world_size": world, "target": there, "layouts": layouts, "refused": faults}
    answer(args, data, lambda: _print(head, found, (*faults, *omitted)))
    return 0 if found else 1


def _search(
    args: argparse.Namespace, base: ConfigContainer, where: TargetMachine, world: int
) -> tuple[list[tuple[str, Layout, str]], list[str], dict[str, None]]:
    """(recipe, layout and what it changes: those that fit before those that are tight, each fastest first; recipes that cannot run, with the reason; what the predictions omit)."""
    found: list[tuple[str, Layout, str]] = []
    faults: list[str] = []
    omitted: dict[str, None] = {}
    names = _names(args)
    for name in names:
        try:
            given = base.mixed_precision
            box = dataclasses.replace(base, mixed_precision=given if name is None else with_recipe(given, name))
            made, valid = _resolved(box, world, where)
            outlook, stated = _alone(where.outlook(made), world), says_optimizer(box)
            policy, facts = outlook.fullest.policy, outlook.fullest.facts
            refused = Counter[str]()
            near = search(
                policy, facts, where.machine, most=args.most, using=where.constants, stated=stated, refused=refused
            )
            mine = _of_all(outlook, near)
            configured, left = made.facts if valid else None, left_batches(made)
            changes = [line(one.run, configured, left=left) or "as configured" for one in mine]
            found += [(names_of(made), one, change) for one, change in zip(mine, changes, strict=True)]
            if not mine:
                why = why_none(policy, facts, where.machine, refused, stated=stated)
                others = f"of the {len(near)} fastest layouts of {outlook.fullest.name} none is valid and fits in every stage"
                faults.append(f"{names_of(made)}: {others if near else why}")
            for stage in outlook.stages or (outlook,):
                omitted |= left_out(stage.facts)
        except MpbridgeError as error:
            if len(names) == 1 and isinstance(error, Contradiction):
                raise
            faults.append(error.line)
    if not where.machine.memory_bytes:
        omitted[f"memory: that of {where.machine.label} is unknown, so no layout is rejected for it"] = None
    found.sort(key=lambda row: (row[1].answer == "tight", row[1].seconds))
    return found, faults, omitted


def _resolved(box: ConfigContainer, world: int, where: TargetMachine) -> tuple[Run, bool]:
    """The run in the file's sizes, which need not divide this world, since the search uses sizes of its own; (the run with sizes of 1, False) if those of the file are not valid."""
    smallest, valid = box.smallest_world(), True
    for tried in dict.fromkeys((world if world % smallest == 0 else smallest, smallest)):
        with contextlib.suppress(MpbridgeError):
            made = on_target(box, tried, where)
            break
    else:
        given, valid = box.as_data(), False
        alike: dict[str, Any] = {
            "parallel": {},
            "train": {**(given.get("train") or {}), "micro_batch_size": 1},
            "model": {name: value for name, value in (given.get("model") or {}).items() if name not in PLACES},
        }
        made = on_target(box, 1, where, **alike)
    runs = made.by_stage()
    for name, one in zip(stage_names(made), runs, strict=True):
        with naming(name):
            refuse_unless_native(one.policy, where.machine, where.versions)
    if lost := [violation.found for violation in lost_states(runs)]:  # in every layout
        raise Refused(f"{names_of(made)}: {'; '.join(lost)}")
    return made, valid


def _alone(outlook: Outlook, world: int) -> Outlook:
    """The run, and each stage of a schedule, without model parallelism and without the settings that place layers, which one stage of a pipeline cannot have."""
    ones: dict[str, Any] = dict.fromkeys(("tensor", "pipeline", "context", "expert"), 1)
    sizes = dataclasses.replace(outlook.facts.parallel, world_size=world, virtual_pipeline=None, **ones)
    stages = tuple(_alone(stage, world) for stage in outlook.stages)
    return dataclasses.replace(outlook, facts=unsplit(outlook.facts, sizes), stages=stages)


def _of_all(outlook: Outlook, found: Sequence[Layout]) -> Sequence[Layout]:
    """Layouts of a schedule's fullest stage as those of all its stages, without any in which another one is not valid or does not fit."""
    if not outlook.stages:
        return found
    every = ((one, outlook.on(one.run)) for one in found)
    return [
        dataclasses.replace(
            one, run=held.facts, seconds=held.time.seconds, tokens_per_second=held.time.tokens_per_second,
            needed=held.memory.needed, band=held.memory.band, answer=held.answer or one.answer,
        )
        for one, held in every
        if held.ok
    ]  # fmt: skip


def _names(args: argparse.Namespace) -> list[str | None]:
    """The distinct recipes; None: the file's. Raises UnknownName, RecipeError."""
    if not args.recipes:
        return [None]
    names = list(dict.fromkeys(args.recipes.split(",")))
    for name in names:
        describe(name)
    return [*names]


def says_optimizer(box: ConfigContainer) -> bool:
    """Whether the file sets whether the optimizer is distributed."""
    return "use_distributed_optimizer" in (box.as_data().get("ddp") or {})


def _data(name: str, one: Layout, left_out: tuple[str, ...]) -> dict[str, Any]:
    speed = {"seconds": one.seconds, "tokens_per_second_per_gpu": one.tokens_per_second}
    return {"recipe": name, **speed, **record(one, "needed", "band", "answer", settings=one.line, left_out=left_out)}


def _print(head: str, found: list[tuple[str, Layout, str]], omitted: Iterable[str]) -> None:
    print_line(head)
    rows = [
        (
            str(place), name, f"{one.run.parallel.tensor}", f"{one.run.parallel.pipeline}{f' x {one.run.parallel.virtual_pipeline}' if one.run.parallel.virtual_pipeline else ''}",
            f"{one.run.parallel.context}", f"{one.run.parallel.expert}", f"{one.run.micro_batch_size}", str(one.run.model.get("recompute_granularity") or "none"),
            "distributed" if one.run.optimizer.distributed else "whole" if "exp_avg" not in one.run.traits.shards else "sharded",
            f"{one.seconds:.3g} s", f"{one.tokens_per_second:,.0f}", f"{size(one.needed)} +- {size(one.band)}, {one.answer}",
        )
        for place, (name, one, _) in enumerate(found, start=1)
    ]  # fmt: skip
    print_table(_COLUMNS, rows)
    for place, (_, _, changes) in enumerate(found, start=1):
        print_line(f"{place}: {changes}")
    for words in omitted:
        print_line(f"left out: {words}")
    if not found:
        print_line("no layout is valid and fits")


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
            run = on_target(base, world, where, recipe=name, engine=args.engine or entry.engine)
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


def _print_ranking(
    where: TargetMachine, order: list[Advice], ties: list[str], omitted: list[str], price: float | None
) -> None:
    print_line(f"target {where.line()}", "")
    legal = [advice for advice in order if advice.legal]
    for fits, title in ((True, "valid and fit, in order"), (False, "valid, but do not fit")):
        rows = []
        for place, a in enumerate(legal, start=1):
            if a.fits is fits:
                error = () if a.error is None else (f"{a.error:.2g}",)
                rows.append((f"{place}{a.mark}", a.recipe, a.status, _memory(a), *_speed(a, price), *error, a.reason))
        if fits and not rows:
            print_line(
                "valid and fit: none in this layout (mpbridge check and mpbridge layouts name layouts that do)", ""
            )
        if rows:
            head = ("gradient's error",) if any(a.error is not None for a in legal) else ()
            columns = ("", "recipe", "status", "memory", "step", "GPU hours per 1e9 tokens", *head, "why")
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


class RecommendVerb:
    """`mpbridge recommend`: ranks the recipes that are valid for a model on a machine, with reasons."""

    SUMMARY = "rank the valid recipes for a model on a machine, with reasons"
    ARGUMENTS = (
        *RUN, *TARGET,
        arg("--by", "order of the valid and fitting recipes; error: of one step's gradient, as certify predicts it", ORDERS, default="status"),
        PRICE,
        arg("--runs DIR,DIR", "folders of your runs: a measured step time replaces the prediction for the same recipe"),
        JSON,
    )  # fmt: skip

    @staticmethod
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
        found = [dataclasses.asdict(one) for one in ranked]
        data = {"target": there, "recipes": found, "left_out": omitted, "ties": ties}
        answer(args, data, lambda: _print_ranking(where, ranked, ties, omitted, args.price))
        return 0 if any(advice.legal and advice.fits for advice in ranked) else 1
