"""`mpbridge plan`: shows which fields a recipe would write, what it overrides, and where each value came from."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from mpbridge.cli._schedule import title
from mpbridge.cli.options import JSON, RUN, arg, resolved
from mpbridge.cli.show import facts
from mpbridge.cli.text import answer, print_line, print_table, record, show_table
from mpbridge.common.facts import BESIDE_ADAM, MUONS
from mpbridge.common.formats import DType, say
from mpbridge.common.tables import processes
from mpbridge.planning.memory.keeps import STATES, is_frozen, keeps, kept_fp32
from mpbridge.planning.memory.layers import rank_parameters, unsplit
from mpbridge.planning.memory.names import refuse_idle_rules
from mpbridge.planning.memory.ranks import Coordinates
from mpbridge.planning.rules.trained import NEWTON_SCHULZ
from mpbridge.precision.globs import is_adapter
from mpbridge.precision.sync.plan import plain
from mpbridge.settings.container import Run, Stage

SUMMARY = "show what a recipe would write into a configuration, and what it overrides"
ARGUMENTS = (
    *RUN,
    arg("--explain", "also show where each value of the configuration came from"),
    arg("--on-conflict", "error: exit 1 when the recipe overrides a given value", ("warn", "error"), default="warn"),
    JSON,
)


def run(args: argparse.Namespace) -> int:
    """Prints the plan. Returns 1 if values are overridden and --on-conflict is error."""
    runs = resolved(args).by_stage()
    for one in runs:
        refuse_idle_rules(one.policy, one.facts.shape, depth=one.facts.shape.num_layers)
    answer(args, as_data(runs), lambda: _print(runs, explain=args.explain))
    return 1 if args.on_conflict == "error" and any(one.plan.conflicts for one in runs) else 0


def as_data(runs: Sequence[Run]) -> dict[str, object]:
    """The plan and its context as JSON types, of each stage. runs: `Run.by_stage`."""
    made = runs[0]
    depth = made.facts.shape.num_layers
    return {
        **record(made, "recipe", "engine", "world_size", "brought", "replaced"),
        "meaning": dict(meaning(made)),
        **made.plan.as_data(),
        "bf16_layers": list(made.policy.bf16_layers(depth)) if made.policy.quantized else None,
        "origin": dict(made.origin),
        "values": {name: value for name, value, _ in _explained(made)},
        "stages": [_stage(stage, one) for stage, one in zip(made.stages, runs, strict=True)],
    }


def _stage(stage: Stage, made: Run) -> dict[str, object]:
    decided = made.plan.as_data()
    return {
        "recipe": made.recipe, "until": stage.until, "brought": made.brought, "meaning": dict(meaning(made)),
        **{name: decided[name] for name in ("fingerprint", "writes", "kept")},
    }  # fmt: skip


def meaning(made: Run) -> list[tuple[str, str]]:
    """The policy's facts, and those of the run that have words of their own: who trains hidden matrices, in what, and the states of a scan."""
    run = made.facts
    rows, name = facts(made.policy, run.shape, engine=run.engine), run.optimizer.name
    rows += _trained(made) if made.policy.frozen or run.shape.lora_rank else []
    if name in BESIDE_ADAM:
        kept = keeps(made.policy.settled(dict(run.optimizer.settings)), run.traits, run.optimizer, ddp=run.ddp)
        states = ", ".join(f"{role} {kept[role].dtype.short}" for role in STATES[2:] if role in kept)
        rows.append((f"hidden matrices by {name}", f"{states}; everything else by Adam"))
    if name in MUONS:
        word = str(run.optimizer.settings.get("muon_fp32_matmul_prec") or "medium")
        rows.append(("Newton-Schulz multiplies in", NEWTON_SCHULZ.get(word, f"FP32: torch knows no {word}")))
    if name == "soap":
        rows.append(("SOAP multiplies in", "TF32 on a GPU, FP32 elsewhere"))
    states_dtype = run.model.get("mamba_training_ssm_states_dtype")
    if states_dtype is not None and "M" in run.shape.pattern:
        rows.append(("states between a scan's chunks", f"{say(states_dtype)}, if mamba_ssm takes state_dtype"))
    return rows


def _trained(made: Run) -> list[tuple[str, str]]:
    """How many parameters of the whole model are frozen and trained, and the adapters among the latter."""
    alone, policy = unsplit(made.facts), made.policy
    sizes = {one.name: one.weight.elements for one in rank_parameters(alone, Coordinates.of(0, alone.parallel))}
    frozen = sum(size for name, size in sizes.items() if is_frozen(policy, name))
    adapters = {name: size for name, size in sizes.items() if is_adapter(name)}
    kinds = sorted({DType.FP32.short if kept_fp32(policy, name) else policy.params.short for name in adapters})
    total, of = sum(sizes.values()), ""
    if adapters:
        where = f"adapters of rank {made.facts.shape.lora_rank}, in {' and '.join(kinds)}"
        of = f", {sum(adapters.values()):,} of them in {where}"
    globs = ", ".join(policy.frozen) or "none"
    return [
        ("frozen", f"{frozen:,} of {total:,} parameters ({globs})"),
        ("trained", f"{total - frozen:,} parameters{of}"),
    ]


def _print(runs: Sequence[Run], *, explain: bool) -> None:
    made = runs[0]
    how = "emulated" if made.facts.realization == "emulated" else "native"
    print_line(f"{title(made)} ({how}), engine {made.engine}, {processes(made.world_size)}\n")
    for number, (stage, one) in enumerate(zip(made.stages, runs, strict=True), start=1):
        if len(runs) > 1:
            print_line(*[""] * (one is not made), f"stage {number}: {one.recipe}, until {stage.until or 'the end'}")
        _print_plan(one)
    for note in made.replaced:
        print_line(note)
    if explain:
        print_line()
        print_table(("setting", "value", "from"), _explained(made), title="where the configuration's values came from")


def _print_plan(made: Run) -> None:
    if made.plan.writes or made.plan.kept:
        show_table(made.plan.table())
    else:
        print_line("the recipe changes nothing")
    for setting in made.brought:
        print_line(f"the recipe also sets {setting}")
    print_line()
    print_table(("fact", "value"), meaning(made), title="what it means")


def _explained(made: Run) -> list[tuple[str, str, str]]:
    beside = ("train", "data", "scheduler", "checkpoint", "logger")
    homes = {**made.inputs, **{name: getattr(made, name) for name in beside}}
    rows = []
    for name, source in made.origin.items():
        section, _, key = name.partition(".")
        value = homes.get(section, {}).get(key)
        if section == "mixed_precision":
            value = made.recipe if key == "recipe" else _at(made.stages[0].config.stored(), key)
        elif section == "parallel":
            value = made.inputs["model"].get(key)
        elif not key:
            value = getattr(made.container, section, None)
        rows.append((name, str(plain(value)), source))
    return rows


def _at(values: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, whose keys, as a module's glob, may contain dots themselves; None: there is none."""
    if path in values:
        return values[path]
    below = (_at(item, path[len(name) + 1 :]) for name, item in values.items() if isinstance(item, Mapping) and path.startswith(f"{name}."))  # fmt: skip
    return next((value for value in below if value is not None), None)
