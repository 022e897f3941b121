"""`mpbridge check`: the answer before a run on one screen: is it valid, does it fit, how fast is it, what was assumed, and what else would run."""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpbridge.cli._schedule import names_of, print_schedule, schedule_data, stage_names, title
from mpbridge.cli._target import OPTIONS, TARGET, TargetMachine, asked, left_batches, on_target, sizes_of
from mpbridge.cli.layouts import says_optimizer
from mpbridge.cli.options import DEFAULT_CONFIG, JSON, RUN, arg
from mpbridge.cli.text import answer, print_line, print_table, record
from mpbridge.common.errors import Contradiction, MpbridgeError
from mpbridge.common.tables import GIB, Column, processes
from mpbridge.common.traits import DEFAULT
from mpbridge.planning.advice import Advice, advise, peak
from mpbridge.planning.certificates import sentence
from mpbridge.planning.estimate.candidates import line
from mpbridge.planning.memory.overheads import left_out_of_memory
from mpbridge.planning.outlook import Outlook
from mpbridge.planning.rules.base import BETWEEN_STAGES, Violation
from mpbridge.planning.rules.gemm_shapes import Misfit, spans, token_multiple
from mpbridge.planning.rules.table import rules
from mpbridge.precision.registry import recipes
from mpbridge.settings.container import Run
from mpbridge.settings.huggingface.served import served_as
from mpbridge.training.admission import Admission, on_cpu, resume_faults, scale_warmup
from mpbridge.training.certified import training_of

SUMMARY = "say before a run whether it is valid, fits and how fast it is, what was assumed, and what else would run"
_BATCHES = ("micro_batch_size", "global_batch_size")
MOST = 3
"""Other ways to run it that are shown."""
ARGUMENTS = (*RUN, *TARGET, arg("--rules", "list every rule with its source and exit"), JSON)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Other:
    """Another way to run it."""

    settings: str
    """What to change, to paste after the command."""
    outlook: Outlook
    gains: str


def run(args: argparse.Namespace) -> int:
    """Prints the answer. Returns 1 if the run is not valid or does not fit."""
    if args.rules:
        return _list(args)
    admission = Admission(here=args.target is None and args.machine_file is None, training=False)
    where, made = asked(args, also=admission)
    if admission.here and (faults := resume_faults(made)):
        raise Contradiction(faults, subject="the run cannot start")
    outlook = where.outlook(made)
    runs = made.by_stage()
    lost = (sentence(one.policy, training_of(one)) for one in runs)
    notes = [
        *_of_stages(made, [[f"overridden: {write}" for write in one.plan.conflicts] for one in runs]),
        *made.replaced,
        *admission.notes,
        *admission.trackers,
        *_of_stages(made, [[f"{words} (mpbridge certify)"] if words else [] for words in lost]),
        *dict.fromkeys(words for one in outlook.stages or (outlook,) for words in left_out_of_memory(one.facts)),
    ]
    assumed, others = _assumed(args, made, where), _others(made, where, outlook)
    parts = made, where, outlook, assumed, others, notes
    answer(args, as_data(*parts) if args.json else {}, lambda: _print(*parts))
    return 0 if outlook.ok else 1


def _of_stages(made: Run, notes: Sequence[Sequence[str]]) -> list[str]:
    """Notes on each stage, which those that do not hold of all name."""
    found = []
    for note in dict.fromkeys(note for held in notes for note in held):
        whose = [name for name, held in zip(stage_names(made), notes, strict=True) if note in held]
        found.append(note if len(whose) == len(notes) else f"{' and '.join(whose)}: {note}")
    return found


def _assumed(args: argparse.Namespace, made: Run, where: TargetMachine) -> list[tuple[str, str, str]]:
    """What was not said, and the word that says it."""
    found = []
    if args.config is None:
        found.append(("configuration", DEFAULT_CONFIG, "--config FILE"))
    if args.target is None and args.machine_file is None:
        which = "this one" if made.played is None else "played"
        found.append(("machine", f"{which}, {where.machine.label}", "--target GPU"))
    if args.world_size is None:
        fewest = f"{made.world_size}, as few as the parallel sizes allow"
        found.append(("processes", fewest, f"--world-size {2 * made.world_size}"))
    if assumed := ", ".join(where.assumed):
        options = [f"--{option}" for option, field in OPTIONS.items() if field.replace("_", " ") in assumed]
        found.append(("versions there", assumed, f"{' '.join(options)} X.Y"))
    default = [name for name in _BATCHES if f"train.{name}" not in made.origin]
    return found + [(name.replace("_", " "), str(made.train[name]), f"train.{name}=N") for name in default]


def _others(made: Run, where: TargetMachine, mine: Outlook) -> list[_Other]:
    """What gains something: the fastest layouts (`mpbridge layouts`), then recipes in this layout."""
    found = []
    for one in mine.layouts(MOST - 1, stated=says_optimizer(made.container)):
        world = one.facts.parallel.world_size
        more = [f"--world-size {world}"] if world != made.world_size else []
        settings = " ".join([*more, line(one.facts, mine.facts, left=left_batches(made))]).strip()
        found.append(_Other(settings=settings, outlook=one, gains=mine.gain(one)))
    return [*found, *_recipes(made, where, mine)]


def _recipes(made: Run, where: TargetMachine, mine: Outlook) -> list[_Other]:
    """The recipe of the same engine and compute dtype that gains most; of those whose speeds tie, the one with the best evidence."""
    # --recipe does not change a schedule
    if not mine.answer or made.emulate or mine.stages:
        return []
    held = peak(mine.policy, mine.facts) or 0.0 if mine.ok and mine.answer == "fits" else 0.0
    found: list[tuple[Advice, _Other]] = []
    for name, entry in recipes.items():
        if name == made.recipe or (entry.engine or DEFAULT) != made.engine:
            continue
        try:
            other = on_target(made.container, made.world_size, where, recipe=name, engine=made.engine)
        except MpbridgeError:
            continue
        if other.policy.compute is not mine.policy.compute or (peak(other.policy, mine.facts) or 0.0) <= held:
            continue  # no faster GEMMs: not faster by more than the band
        one = where.outlook(other)
        if gains := mine.gain(one):
            found.append((advise(entry, one), _Other(settings=f"--recipe {name}", outlook=one, gains=gains)))
    found = [pair for pair in found if pair[0].fit == min(one.fit for one, _ in found)]
    fastest = min((one.seconds or 0.0 for one, _ in found), default=0.0)
    ties = [pair for pair in found if (pair[0].seconds or 0.0) <= fastest * (1 + pair[0].band)]
    ties.sort(key=lambda pair: pair[0].rank)
    if not ties:
        return []
    more = f" ({len(ties) - 1} more within the band: mpbridge recommend)" if len(ties) > 1 else ""
    return [dataclasses.replace(ties[0][1], gains=f"{ties[0][1].gains}{more}")]


Assumed = list[tuple[str, str, str]]
"""(what, the value, the word that sets it)."""


def as_data(
    made: Run, where: TargetMachine, one: Outlook, assumed: Assumed, others: list[_Other], notes: list[str]
) -> dict[str, Any]:
    """The answer as JSON types."""
    stages = one.stages or (one,)
    kept = [each.policy.bf16_layers(each.facts.shape.num_layers) for each in stages if each.policy.quantized]
    return {
        **record(one, "ok", "verdict", "objections"),
        "undecided": {name: why for name, why in (("fits", one.no_answer), ("time", one.no_time)) if why},
        "recipe": names_of(made),
        **record(made, "engine", "world_size"),
        "parallel": dataclasses.asdict(made.facts.parallel),
        "target": {
            "machine": where.machine.name,
            "arch": where.machine.sm,
            "versions": dataclasses.asdict(where.versions),
            "assumed": list(where.assumed),
        },
        "assumed": [dict(zip(("what", "value", "set_by"), row, strict=True)) for row in assumed],
        "capability": dataclasses.asdict(one.capability),
        "played": made.played is not None,
        "played_on": on_cpu(made) if made.played is not None else None,
        "violations": [dataclasses.asdict(v) for v in one.violations],
        "sizes": [dataclasses.asdict(f) | {"pad": f.pad} for f in one.misfits],
        **_figures(one),
        "schedule": schedule_data(made, one),
        "others": [record(other, "settings", "gains", **_figures(other.outlook)) for other in others],
        "bf16_layers": sorted(set[int]().union(*kept).intersection(*kept)),
        "steps_that_the_first_loss_scale_may_cost": max(
            scale.skips() if (scale := each.policy.loss_scale) else 0 for each in stages
        ),
        "scale": _warmup(made, one),
        "token_multiple": math.lcm(*(token_multiple(each.policy, each.facts) for each in stages)),
        "notes": notes,
        "served_as": _served(one),
    }


def _served(one: Outlook) -> str:
    """How the weights are served that the run, in a schedule its last stage, leaves."""
    last = one.stages[-1] if one.stages else one
    return served_as(last.policy, last.facts, last.facts.model)


def _warmup(made: Run, one: Outlook) -> str:
    """What the first loss scale may cost, in words; in a schedule that of each stage that has one."""
    said = (
        (each.name, scale_warmup(each.policy.loss_scale, made.train["train_iters"])) for each in one.stages or (one,)
    )
    return "; ".join(f"{name}: {words}" if name else words for name, words in said if words)


def _figures(one: Outlook) -> dict[str, Any]:
    fits = one.fit if one.answer else None
    time = None if one.no_time else one.time
    return {
        "fit": fits and dataclasses.asdict(fits) | {"ok": fits.ok, "parts": one.parts},
        "time": time and record(time, "seconds", "span", "because", tokens_per_second_per_gpu=time.tokens_per_second),
    }


def _print(
    made: Run, where: TargetMachine, one: Outlook, assumed: Assumed, others: list[_Other], notes: list[str]
) -> None:
    there = f"{processes(made.world_size)} on {where.machine.label}"
    print_line(f"{title(made)}, engine {made.engine}, {there}", sizes_of(made.facts.parallel))
    if made.played is not None:
        print_line(f"here   played {on_cpu(made)}")
    print_line()
    errors, warnings = len(one.errors), len(one.violations) - len(one.errors)
    print_line(
        f"valid  {'no' if errors else 'yes'}: {errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}",
        f"runs   {one.capability.how}{'' if one.capability.proven else ' (unproven)'}: {one.capability.reason}",
        f"fits   {_fits(one)}",
        f"time   {_time(one)}",
    )
    if warmup := _warmup(made, one):
        print_line(f"scale  {warmup}")
    if served := _served(one):
        print_line(f"served as: {served}")
    print_line()
    print_schedule(made, one)
    _print_violations(one.violations)
    # what only costs speed can wait for a run that is valid
    _print_sizes([f for f in one.misfits if not errors or f.level in ("required", "gatherable")])
    if assumed:
        print_table(("not said", "assumed", "to say it"), assumed)
        print_line()
    if others:
        first = others[0].settings
        rows = []
        for other in others:
            step = "" if other.outlook.no_time else f"{other.outlook.time.seconds:.3g} s, "
            size = f"{step}{other.outlook.memory.needed / GIB.size:.1f} GiB"
            rows.append((other.gains, size, _beside(other.settings, first)))
        print_table(("instead", "step and memory", Column(name="to change", number=False, whole=True)), rows)
        print_line()
    elif one.answer and one.capability.native:
        nothing = "no layout gains more than the band (mpbridge layouts)"
        either = "no layout and no recipe gains more than the band (mpbridge layouts, mpbridge recommend)"
        print_line(f"instead  {nothing if one.stages else either}")
        print_line()
    for note in notes:
        print_line(f"note   {note}")
    print_line(f"verdict  {one.verdict}")


def _beside(settings: str, first: str) -> str:
    """Settings as they are shown below the first: where they set all that it sets, only what differs."""
    words, known = shlex.split(settings), shlex.split(first)
    names, others = ({word.partition("=")[0] for word in one} for one in (words, known))
    if words == known or not others <= names:
        return settings
    return f"the first, then {shlex.join(word for word in words if word not in known)}"


def _fits(one: Outlook) -> str:
    if not one.answer:
        return f"not decided: {one.no_answer}"
    sizes = (one.memory.needed, one.memory.band, one.machine.memory_bytes)
    need, off, have = (f"{size / GIB.size:.1f}" for size in sizes)
    word = {"fits": "yes", "tight": "tight", "does not fit": "no"}[one.answer]
    parts = ", ".join(f"{name} {size / GIB.size:.1f}" for name, size in one.parts.items())
    where = f"{one.fullest.name}, " if one.stages else ""
    return f"{word}: {where}{need} +- {off} GiB of {have} ({parts}; mpbridge memory)"


def _time(one: Outlook) -> str:
    if one.no_time:
        return f"not decided: {one.no_time}"
    low, high = one.time.span
    return (
        f"{one.time.seconds:.3g} s per step ({low:.3g} to {high:.3g}: {one.time.because}), "
        f"{one.time.tokens_per_second:,.0f} tokens/s per GPU (mpbridge estimate)"
    )


def _print_violations(violations: Sequence[Violation]) -> None:
    for v in violations:
        print_line(f"{v.severity}: {v.rule}")
        source = f"{v.source}{f' ({v.versions})' if v.versions else ''}"
        for name, text in (("found", v.found), ("expected", v.expected), ("cure", v.cure), ("source", source)):
            print_line(f"{name:8}  {text}", indent="  ")
    if violations:
        print_line()


def _print_sizes(findings: Sequence[Misfit]) -> None:
    alike: dict[tuple[object, ...], list[Misfit]] = {}
    for f in findings:  # what has the same cure is one row
        alike.setdefault((f.level, f.multiple, f.cure), []).append(f)
    rows = []
    for (level, multiple, cure), found in alike.items():
        each = [(f"{f.module} {f.value or ''}".strip(), _layers(f.layers), f.dimension) for f in found]
        texts = (", ".join(filter(None, dict.fromkeys(column))) for column in zip(*each, strict=True))
        rows.append((level, *texts, multiple if multiple != 1 else "", cure))
    if rows:
        print_table(("size", "module", "layers", "dimension", "multiple of", "what to do"), rows, title="sizes")
        print_line()


def _layers(layers: Sequence[int]) -> str:
    """As text, counted where a hybrid's layers alternate: '26 of 2-58'. --json has them all."""
    text = spans(layers)
    return text if len(text) <= 24 else f"{len(layers)} of {layers[0]}-{layers[-1]}"


def _list(args: argparse.Namespace) -> int:
    rows = [
        (one.severity, one.id, one.expected, " and ".join(map(str, one.holds)), one.source)
        for one in (*rules(), BETWEEN_STAGES)
    ]
    names = ("severity", "id", "expected", "holds", "source")
    columns = ("severity", "rule", "what it expects", "applies to", "source")
    data = {"rules": [dict(zip(names, row, strict=True)) for row in rows]}
    answer(args, data, lambda: print_table(columns, rows, title=f"{len(rows)} rules"))
    return 0
