"""A recipe's card: what it needs, what it stores, what it costs, which rules apply to it. Data for `mpbridge show`; prints nothing."""

from __future__ import annotations

from dataclasses import dataclass

from mpbridge.common.facts import ModelShape, OptimizerFacts, Parallel, RunFacts
from mpbridge.common.formats import DType
from mpbridge.common.machines import machines
from mpbridge.common.traits import DEFAULT, EngineTraits
from mpbridge.common.traits import traits as traits_of
from mpbridge.planning.capability import ASSUMED, can_run
from mpbridge.planning.memory.by_role import memory
from mpbridge.planning.memory.keeps import keeps, updater
from mpbridge.planning.rules.table import rules
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.recipe import Recipe
from mpbridge.precision.registry import describe
from mpbridge.precision.resolve import resolve

_SHAPE = ModelShape(
    num_layers=80, hidden_size=8192, num_attention_heads=64, ffn_hidden_size=28672, num_query_groups=8, kv_channels=128, vocab_size=128256, seq_length=8192,
    gated=True, tied=False, linear_bias=False, norm_bias=False,
)  # fmt: skip
"""The shape of Llama 3 70B: its embeddings and bucket padding are a small share, so the numbers are close to the formula's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What is known about a recipe besides its fields."""

    recipe: str
    native_on: tuple[str, ...]
    """Machines of the table that run it natively, with the assumed versions."""
    unproven_on: tuple[str, ...]
    compute: str
    """Formats of the GEMMs' operands."""
    stored: str
    """Formats in which weights are stored."""
    exported: str
    """Formats of a checkpoint's weights."""
    bytes_alone: float
    """Bytes of state per parameter on one GPU (a 70B model's shape on the first machine that runs it)."""
    bytes_shared: float
    """The same with optimizer states, or everything, sharded over eight GPUs."""
    rules: tuple[str, ...]
    """Ids of the rules that apply to a recipe of this kind."""


def card(name: str) -> Card:
    """The card of any recipe that `describe` knows. Raises UnknownName."""
    entry = describe(name)
    policy = resolve(entry.make())
    answers = {row.name: can_run(policy, row, ASSUMED) for row in machines.values()}
    native = [name for name, answer in answers.items() if answer.native]
    tagged = traits(policy, entry)
    return Card(
        recipe=entry.name,
        native_on=tuple(name for name in native if answers[name].proven),
        unproven_on=tuple(name for name in native if not answers[name].proven),
        compute=_compute(policy),
        stored=_stored(policy, entry),
        exported=policy.params.short + (" (low-precision weights are dequantized)" if policy.stored else ""),
        bytes_alone=_bytes(policy, entry, 1, native),
        bytes_shared=_bytes(policy, entry, 8, native),
        rules=tuple(rule.id for rule in rules() if rule.about and set(rule.about.split()) <= tagged),
    )


def traits(policy: PrecisionPolicy, entry: Recipe) -> set[str]:
    """The traits by which rules name the recipes that they are about."""
    found: set[str] = {quant.scaling for quant in policy.quants}
    switches = {
        "quantized": policy.quantized,
        "fp8": policy.fp8 is not None,
        "stored": policy.stored,
        "edges": policy.ends is not None,
        "fp16": policy.compute is DType.FP16,
        "sixteen": policy.mixed,
        "aware": bool(policy.precision_aware),
        "own_copy": policy.narrow_alone,
        "fp32_storage": policy.params is DType.FP32 and policy.mixed,
        "fp32_grads": policy.reduce is DType.FP32 and policy.mixed,
    }
    found |= {name for name, on in switches.items() if on}
    return found | ({entry.engine} if entry.engine else set())


def _compute(policy: PrecisionPolicy) -> str:
    if policy.quant is None:
        return policy.compute.short
    quant = policy.quant
    forward, backward = quant.element(gradient=False), quant.element(gradient=True)
    formats = forward if forward == backward else f"{forward}, gradients {backward}"
    return f"{formats} with {quant.scaling} scaling in linears; {policy.compute.short} elsewhere"


def _stored(policy: PrecisionPolicy, entry: Recipe) -> str:
    stored, quant = policy.params.short, policy.quant
    if quant is not None and quant.stored:
        stored = f"{quant.element(gradient=False)} in quantized linears, {stored} elsewhere"
    return f"{stored}; main weights {main_weights(policy, traits_of(entry.engine or DEFAULT))}"


def main_weights(policy: PrecisionPolicy, engine: EngineTraits) -> str:
    """What the main weights are and who keeps them, as text."""
    settled = policy.settled()
    distributed = engine.distributed_optimizer != "never" and not settled.narrow_alone
    optimizer = OptimizerFacts(name=updater("adam", settled, engine), distributed=distributed)
    kept = keeps(settled, engine, optimizer)
    held = kept.get("main_params")
    if held is None:
        return f"{kept['params'].dtype.short} in the parameters themselves"
    core = "megatron-core" if engine.main_weights == "megatron_core" else engine.full_name
    keeper = "FusedAdam" if held.owner == "optimizer" else core
    if held.dtype is DType.INT16:
        return f"fp32 kept by {keeper}, as 16 more bits of BF16 parameters"
    return f"{held.dtype.short} kept by {keeper}"


def _bytes(policy: PrecisionPolicy, entry: Recipe, ranks: int, native: list[str]) -> float:
    engine = entry.engine or DEFAULT
    known = {row.name: row for row in machines.values()}
    first = next((known[name] for name in ("H100", "B200") if name in native), None)
    # 16-bit parameters that are their own main copy cannot be sharded by megatron-core's distributed optimizer
    shared = policy.stored or (ranks > 1 and not policy.narrow_alone)
    run = RunFacts(
        shape=_SHAPE,
        parallel=Parallel(world_size=ranks),
        engine=engine,
        optimizer=OptimizerFacts(distributed=shared, name=updater("adam", policy.settled(), traits_of(engine))),
        ddp={"reuse_grad_buf_for_mxfp8_param_ag": policy.reuse_grad_buffer},
        machine=first,
    )
    return memory(policy, run, rank=0).bytes_per_parameter
