"""Whether mpbridge itself trains what was imported: the rules of an engine, asked of a recipe with a plain dense model."""

from __future__ import annotations

import dataclasses

from mpbridge.common.facts import ModelShape, OptimizerFacts, Parallel, RunFacts
from mpbridge.common.traits import DEFAULT, engine_names, traits
from mpbridge.interop.stacks.nearest import Answer
from mpbridge.planning.hardware.capability import ASSUMED
from mpbridge.planning.memory.keeps import updater
from mpbridge.planning.rules.base import Violation
from mpbridge.planning.rules.table import broken
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.megatron_spec.versions import RELEASES
from mpbridge.precision.registry import describe, get_mixed_precision_config
from mpbridge.precision.resolve import resolve

_SHAPE = ModelShape(
    num_layers=96, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=16384, num_query_groups=32, kv_channels=128, vocab_size=32768,
    seq_length=4096,
)  # fmt: skip
"""A model whose sizes fit every scaling, so that only the recipe decides."""
_VERSIONS = dataclasses.replace(ASSUMED, megatron_core=RELEASES[-1].version)
"""The newest megatron-core that is supported: what it lacks, none has."""


def refusals(told: Answer) -> tuple[str, ...]:
    """What forbids the answer on its engine, each with its cure, and then which engines of mpbridge allow it. Empty if nothing does."""
    if told.recipe is None:
        return ()
    config = get_mixed_precision_config(told.recipe).derive(**told.overrides)
    own = told.engine or describe(told.recipe).engine or DEFAULT
    errors = _errors(config, own)
    if not errors:
        return ()
    others = [name for name in engine_names() if name != own and not _errors(config, name)]
    lines = [f"{error.found}: {error.rule}; cure: {error.cure}" for error in errors]
    named = (
        f"engine={' or '.join(others)} allows it (megatron-core {_VERSIONS.megatron_core})"
        if others
        else "no engine of mpbridge allows it as it is"
    )
    return (*lines, named)


def _errors(config: MixedPrecisionConfig, engine: str) -> tuple[Violation, ...]:
    """The errors of a recipe on an engine, with the optimizer states divided where its parameters allow it."""
    policy = resolve(config)
    divides = traits(engine).main_weights != "optimizer" and (policy.stored or not policy.narrow_alone)
    optimizer = OptimizerFacts(distributed=divides, name=updater("adam", policy.settled(), traits(engine)))
    run = RunFacts(
        shape=_SHAPE, parallel=Parallel(world_size=8), engine=engine, optimizer=optimizer, versions=_VERSIONS, global_batch_size=8,
        ddp={"reuse_grad_buf_for_mxfp8_param_ag": policy.reuse_grad_buffer},
    )  # fmt: skip
    return tuple(one for one in broken(policy, run) if one.severity == "error")
