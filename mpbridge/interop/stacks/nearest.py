"""Finds the registered recipe that expresses given settings with the fewest additions, and whether mpbridge trains it: the rules of an engine, asked of it with a plain dense model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mpbridge.common.errors import MpbridgeError
from mpbridge.common.facts import BESIDE_ADAM, ModelShape, OptimizerFacts, Parallel, RunFacts
from mpbridge.common.formats import say
from mpbridge.common.traits import DEFAULT, engine_names, traits
from mpbridge.interop.stacks.meaning import OPEN, Meaning, differences, of_policy
from mpbridge.planning.capability import ASSUMED
from mpbridge.planning.memory.keeps import updater
from mpbridge.planning.rules.base import Violation
from mpbridge.planning.rules.table import broken
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.megatron_spec.versions import RELEASES
from mpbridge.precision.policy import PrecisionPolicy, own_main
from mpbridge.precision.registry import describe, get_mixed_precision_config, recipes
from mpbridge.precision.resolve import resolve

_KIND: Mapping[str, int] = {"fp8": 4, "fp8_recipe": 8, "fp4": 4, "bf16": 4, "fp16": 4, "fp32": 4, "params_dtype": 2}
"""Settings that define a recipe's kind, a scaling's name most of all: 'the delayed recipe with five changes' is a better answer than 'blockwise, but delayed'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A recipe and the changes that it needs."""

    recipe: str | None
    """None: no recipe can express it; `why` gives the reason."""
    overrides: Mapping[str, Any]
    engine: str | None = None
    """Settings needed in addition, where the recipe differs."""
    why: str = ""
    distance: int = 0
    """Number of policy facts in which the unchanged recipe differs from the request."""

    @property
    def weight(self) -> int:
        """The recipe's distance: one per changed setting, more if the change makes it another kind of recipe."""
        return sum(_KIND.get(name, 1) for name in self.overrides) + (self.engine is not None)

    def __str__(self) -> str:
        if self.recipe is None:
            return f"no recipe expresses this: {self.why}"
        changes = [f"{name}={say(value)}" for name, value in self.overrides.items()]
        return ", ".join([self.recipe, *changes, *([f"engine={self.engine}"] if self.engine else [])])


def answer(fields: Mapping[str, Any], *, engine: str = DEFAULT, meaning: Meaning | None = None) -> Answer:
    """The recipe nearest to a config with these fields: fewest changed settings, then its own engine, then fewest differing policy facts, then the registry's order.

    meaning: the source's meaning; a recipe for the same engine with exactly that meaning is the answer, regardless of its settings.
    """
    try:
        config = MixedPrecisionConfig.from_data(fields)
        wanted = resolve(config)
    except MpbridgeError as error:
        return Answer(recipe=None, overrides={}, why=str(error))
    stated = (wanted.keep_fp32, wanted.frozen, wanted.logits, wanted.router, wanted.residual_fp32, wanted.softmax_fp32)
    if meaning is not None and not any(stated):  # then a meaning has everything that the policy states
        for name in recipes:
            if (recipes[name].engine or DEFAULT) == engine and _means(name, engine, meaning, wanted):
                return Answer(recipe=name, overrides={})
    found = [_from(name, config, wanted, engine) for name in recipes]
    candidates = [one for one in found if one is not None]
    # of two that are equally near, the one whose name speaks of the engine at hand
    return min(candidates, key=lambda one: (one.weight, one.engine is not None, one.distance))


def apart(told: Answer, meaning: Meaning, *, engine: str = DEFAULT) -> Mapping[str, tuple[str, str]]:
    """row -> (there, here) for every fact in which the recipe, on its engine, differs from the settings."""
    if told.recipe is None:
        return {}
    policy = resolve(get_mixed_precision_config(told.recipe).derive(**told.overrides))
    mine = _as_beside(policy, engine, meaning)
    # what a stack leaves to the model is not a promise
    left = [name for name in OPEN if getattr(meaning, name) is None]
    return {row: pair for row, pair in differences(meaning, mine).items() if row not in left}


def _as_beside(policy: PrecisionPolicy, engine: str, meaning: Meaning) -> Meaning:
    """A policy divided, and under the optimizer, as the other: a recipe states the dtypes of moments, not which there are."""
    return dataclasses.replace(of_policy(policy, engine=engine, sharded=meaning.sharded), optimizer=meaning.optimizer)


def _means(name: str, engine: str, meaning: Meaning, wanted: PrecisionPolicy) -> bool:
    try:
        policy = resolve(get_mixed_precision_config(name))
        mine = _as_beside(policy, engine, meaning)
    except MpbridgeError:  # a third-party recipe that does not load
        return False
    # a recipe whose parameters are their own main weights never matches one with separate ones, even if a sharded optimizer would
    return own_main(policy) == own_main(wanted) and not differences(mine, meaning)


def _from(name: str, config: MixedPrecisionConfig, wanted: PrecisionPolicy, engine: str) -> Answer | None:
    entry = recipes[name]
    try:
        base = get_mixed_precision_config(name)
        before = resolve(base)
    except MpbridgeError:  # ignore third-party recipes that do not load
        return None
    stored, mine = config.stored(), base.stored()
    changes = {field: value for field, value in stored.items() if value != mine[field]}
    for field in tuple(changes):
        fewer = {key: value for key, value in changes.items() if key != field}
        if _same(base, fewer, wanted):
            changes = fewer
    own = entry.engine or DEFAULT
    distance = sum(getattr(before, fact) != getattr(wanted, fact) for fact in PrecisionPolicy.__dataclass_fields__)
    return Answer(recipe=name, overrides=changes, engine=None if own == engine else engine, distance=distance)


def _same(base: MixedPrecisionConfig, changes: Mapping[str, Any], wanted: PrecisionPolicy) -> bool:
    try:
        found = resolve(base.derive(**changes))
    except MpbridgeError:
        return False
    # a fact that is left open is FP32 or off, as it is where it is stated so
    return found.settled() == wanted.settled() and own_main(found) == own_main(wanted)


_SHAPE = ModelShape(
    num_layers=96, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=16384, num_query_groups=32, kv_channels=128, vocab_size=32768,
    seq_length=4096,
)  # fmt: skip
"""A model whose sizes fit every scaling, so that only the recipe decides."""
_VERSIONS = dataclasses.replace(ASSUMED, megatron_core=RELEASES[-1].version)
"""The newest megatron-core that is supported: what it lacks, none has."""


def refusals(told: Answer, trains: Mapping[str, Any] = MappingProxyType({})) -> tuple[str, ...]:
    """What forbids the answer on its engine, each with its cure and source, and then which engines of mpbridge allow it. Empty if nothing does.

    trains: the run's settings of the section `optimizer`; {}: Adam's.
    """
    if told.recipe is None:
        return ()
    config = get_mixed_precision_config(told.recipe).derive(**told.overrides)
    own = told.engine or describe(told.recipe).engine or DEFAULT
    errors = _errors(config, own, trains)
    if not errors:
        return ()
    others = [name for name in engine_names() if name != own and not _errors(config, name, trains)]
    lines = [f"{error.found}: {error.rule}; cure: {error.cure} [{error.source}]" for error in errors]
    named = f"engine={' or '.join(others)} allows it (megatron-core {_VERSIONS.megatron_core})"
    return (*lines, named if others else "no engine of mpbridge allows it as it is")


def _errors(config: MixedPrecisionConfig, engine: str, trains: Mapping[str, Any]) -> tuple[Violation, ...]:
    """The errors of a recipe on an engine, with the optimizer states divided where its parameters allow it."""
    policy = resolve(config)
    divides = traits(engine).main_weights != "optimizer" and (policy.stored or not policy.narrow_alone)
    named = str(trains.get("optimizer") or "adam")
    alone = named in BESIDE_ADAM and not policy.stored
    name = updater(named, policy.settled(), traits(engine))
    optimizer = OptimizerFacts(distributed=divides and not alone, name=name, settings=trains)
    run = RunFacts(
        shape=_SHAPE, parallel=Parallel(world_size=8), engine=engine, optimizer=optimizer, versions=_VERSIONS, global_batch_size=8,
        ddp={"reuse_grad_buf_for_mxfp8_param_ag": policy.reuse_grad_buffer},
    )  # fmt: skip
    return tuple(one for one in broken(policy, run) if one.severity == "error")
