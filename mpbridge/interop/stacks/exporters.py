"""export(): a recipe in another stack's configuration, by the stack's name; and which version of a stack is read or written."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from mpbridge.common.errors import BadValue, UnknownName, cut
from mpbridge.common.formats import dtype, say
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks.base import Export, Line, Request
from mpbridge.interop.stacks.meaning import OPEN, STATED, Meaning
from mpbridge.planning.memory.names import any_gpt, unnamed
from mpbridge.precision.config import ROWS, MixedPrecisionConfig
from mpbridge.precision.megatron_spec.schema import records
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.registry import describe, get_mixed_precision_config, key, model_of
from mpbridge.precision.resolve import resolve

STACKS: tuple[str, ...] = (
    "megatron-lm", "megatron-bridge", "automodel", "torchtitan", "fsdp2", "accelerate", "lightning", "deepspeed", "transformers",
)  # fmt: skip


def stack_module(name: str) -> ModuleType:
    """The module of a stack: NAME, VERSIONS (the latest last), export. Raises UnknownName."""
    wanted = name.strip().lower().replace("_", "-")
    if wanted not in STACKS:
        raise UnknownName("stack", name, STACKS)
    return importlib.import_module(f"mpbridge.interop.stacks.{wanted.replace('-', '_')}")


def export(
    recipe: str | Path | MixedPrecisionConfig, stack: str, *, version: str | None = None, engine: str | None = None, run: Any = None
) -> Export:  # fmt: skip
    """`recipe` in the configuration of `stack`, with a line for each fact that is not preserved.

    recipe: a name, a YAML file, or a config. version: of the stack; None: the latest supported one. For an unsupported version the nearest is used,
    which `assumed` reports. engine: None: the recipe's own.
    run: a resolved Run, whose additions to the recipe, engine and optimizer settings are exported too; its recipe and engine take precedence.
    Raises UnknownName for a stack or a recipe.
    """
    module = stack_module(stack)
    words, assumed = version_for(module, version, doing="written")
    others: tuple[Line, ...] = ()
    if run is None:
        config = get_mixed_precision_config(recipe)  # whose faults name the file
        own = describe(recipe).engine if isinstance(recipe, str) else None
        policy, kind = resolve(config), engine or own or DEFAULT
    else:
        named = [one for one in run.stages if isinstance(recipe, str) and one.recipe == key(recipe)]
        stage = (named or run.stages)[0]
        config, kind = stage.config, run.facts.engine
        policy, others = _with_the_models_own(run, stage.policy.settled()), _other_stages(run, stage)
    request = Request(
        name=str(recipe) if isinstance(recipe, (str, Path)) else "this config", config=config, policy=policy, engine=kind, version=words, run=run,
        # all of its rules by module, if the recipe's evidence says that they are for another model
        unnamed=policy.module_regions if model_of(str(recipe)) else unnamed(policy, *any_gpt()),
    )  # fmt: skip
    made: Export = module.export(request)
    experts, dense = _experts(module, request, made)
    lines = (*others, *experts, *_without_words(policy), *made.lines)
    return dataclasses.replace(made, lines=lines, assumed=(*made.assumed, *assumed, *dense))


def _without_words(policy: PrecisionPolicy) -> tuple[Line, ...]:
    """A line for each fact that the recipe states and that `Meaning`, in which stacks are compared, has no row for."""
    # main, optimizer_reads are Meaning's names of these two
    known = {field.name for field in dataclasses.fields(Meaning)} | {"main_params", "main_grads"}
    facts = {name: getattr(policy, row.fact) for name, row in ROWS.items() if row.fact and row.fact not in known}
    words = {name: f"{say(value)} here, no words for it there" for name, value in facts.items() if value is not None}
    return tuple(Line(fidelity="impossible", fact=name, text=text) for name, text in words.items())


def _experts(module: ModuleType, request: Request, made: Export) -> tuple[tuple[Line, ...], tuple[str, ...]]:
    """(a line for a run whose model is a mixture of experts, an assumption where no run is known) if the stack quantizes experts otherwise than here.

    What it does with the experts is its module's EXPERTS, or is told by its `experts` of a policy.
    """
    text = getattr(module, "EXPERTS", "")
    there = text and f"in {made.meaning.compute.short.upper()} there: {text}"
    if made.meaning.regions[-1].quant is None:
        there = ""
    elif hasattr(module, "experts"):
        there = module.experts(request.policy)
    if there and request.run is None:
        dense = f"a dense model; the experts of a mixture are quantized here, {there} (--config FILE: judged for that model)"
        return (), (dense,)
    lost = there and request.run.facts.shape.experts
    return (Line(fidelity="different", fact="experts", text=f"quantized here, {there}"),) if lost else (), ()


def request_of(run: Any) -> Request:
    """The request that corresponds to a run of one stage: its `ours` is the run's meaning."""
    stage = run.stages[0]
    policy = _with_the_models_own(run, stage.policy.settled())
    return Request(name=stage.recipe, config=stage.config, policy=policy, engine=run.facts.engine, version="", run=run)


def _other_stages(run: Any, exported: Any) -> tuple[Line, ...]:
    """A line if a run has recipes other than the exported one: no stack changes its precision during a run."""
    if len(run.stages) < 2:
        return ()
    ends = ["" if stage.until is None else f" until {stage.until}" for stage in run.stages]
    order = ", then ".join(stage.recipe + end for stage, end in zip(run.stages, ends, strict=True))
    text = f"the run uses {order} in turn; only {exported.recipe} is exported: there, each stage is a run of its own, continued from the previous checkpoint"
    return (Line(fidelity="impossible", fact="stages", text=text),)


def _with_the_models_own(run: Any, policy: PrecisionPolicy) -> PrecisionPolicy:
    """The policy, with the facts that the recipe leaves to the model filled from the run's model section, so that they are exported too."""
    defaults, said = records("model"), dict(run.container.model)
    own: dict[str, Any] = {
        fact: dtype(said[name]) if name.endswith("dtype") else said[name]
        for fact, (_, name) in STATED.items()
        if fact in OPEN and getattr(policy, fact) is None
        if said.get(name) not in (None, defaults.get(name, {}).get("default"))
    }
    # megatron-core switches it on, whatever else is said
    own |= {"softmax_fp32": True} if said.get("apply_query_key_layer_scaling") else {}
    return dataclasses.replace(policy, **own)


_NUMBER = re.compile(r"(?:core_)?v?(\d+(?:\.\d+)*)", re.IGNORECASE)


def version_for(module: ModuleType, asked: str | None, *, doing: str) -> tuple[str, tuple[str, ...]]:
    """(version to use, assumption) of a stack's module; nothing is assumed for a supported version.

    asked: None: the latest supported one. For an unsupported one: the last supported version before it, else the first; the latest if it is not a number.
    doing: the verb in the assumption ('read', 'written'). Raises BadValue for an empty version.
    """
    versions: Mapping[str, str] = module.VERSIONS
    latest, wanted = [*versions][-1], None if asked is None else asked.strip()
    if wanted is None:
        return latest, ()
    if not wanted:
        raise BadValue(f"the version of {module.NAME} is empty: give one, or omit it for {latest}")
    exact = next((key for key, what in versions.items() if wanted in (key, *re.split(r"[,\s]+", what))), None)
    if exact is not None:
        return exact, ()
    found = _nearest(wanted, versions) or latest
    known = ", ".join(f"{key} ({what})" for key, what in versions.items())
    text = f"{module.NAME} {cut(wanted)} is not supported (known: {known}): {doing} as {found}, whose settings may mean something else there"
    return found, (text,)


def _nearest(wanted: str, versions: Mapping[str, str]) -> str | None:
    """The last version up to `wanted`, else the first; None if either has no number."""
    number = _number(wanted)
    known = {key: value for key in versions if (value := _number(key)) is not None}
    if number is None or not known:
        return None
    before = [key for key, value in known.items() if value <= number[: len(value)]]
    return max(before, key=known.__getitem__) if before else min(known, key=known.__getitem__)


def _number(version: str) -> tuple[int, ...] | None:
    found = _NUMBER.match(version)
    return None if found is None else tuple(int(part[:9]) for part in found[1].split("."))
