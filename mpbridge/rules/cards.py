"""A recipe's card: what it needs, what it keeps, what it costs, which rules speak of it. Data for `mpbridge show`; nothing is printed here."""

from __future__ import annotations

from dataclasses import dataclass

from mpbridge.facts import ModelShape, OptimizerFacts, Parallel, RunFacts, optimizer_name
from mpbridge.formats import DType
from mpbridge.hardware.capability import ASSUMED, can_run
from mpbridge.hardware.machines import machines
from mpbridge.memory.budget import memory
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.registry import Recipe, describe
from mpbridge.precision.resolve import resolve
from mpbridge.rules.table import rules

_SHAPE = ModelShape(
    num_layers=80, hidden_size=8192, num_attention_heads=64, ffn_hidden_size=28672, num_query_groups=8, kv_channels=128, vocab_size=128256, seq_length=8192,
    gated=True, tied=False, linear_bias=False, norm_bias=False,
)  # fmt: skip
"""Of Llama 3 70B: on it the embeddings and the buckets' padding weigh little, so the numbers are near the formula's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What is known of a recipe besides its fields."""

    recipe: str
    native_on: tuple[str, ...]
    """Machines of the table that run it natively, with the assumed versions."""
    unproven_on: tuple[str, ...]
    compute: str
    """What GEMMs see."""
    stored: str
    """What weights are at rest."""
    exported: str
    """What a checkpoint's weights are."""
    bytes_alone: float
    """States, bytes a parameter, on one GPU (a 70B model's shape on the first machine that runs it)."""
    bytes_shared: float
    """The same with optimizer states, or everything, shared by eight."""
    rules: tuple[str, ...]
    """Ids of the rules that speak of a recipe of this kind."""


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
        exported=f"{policy.params.short} (low-precision weights are widened again)"
        if policy.stored
        else policy.params.short,
        bytes_alone=_bytes(policy, entry, 1, native),
        bytes_shared=_bytes(policy, entry, 8, native),
        rules=tuple(rule.id for rule in rules() if rule.about and set(rule.about.split()) <= tagged),
    )


def traits(policy: PrecisionPolicy, entry: Recipe) -> set[str]:
    """The words by which rules name the recipes that they speak of."""
    found: set[str] = {quant.scaling for quant in policy.quants}
    switches = {
        "quantized": policy.quantized,
        "fp8": policy.fp8 is not None,
        "stored": policy.stored,
        "edges": policy.ends is not None,
        "fp16": policy.compute is DType.FP16,
        "sixteen": policy.mixed,
        "aware": bool(policy.precision_aware),
        "own_copy": policy.own_main_copy,
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
    owner = {"engine": "megatron-core", "optimizer": "FusedAdam", "params": "the parameters themselves"}[
        policy.main_params_owner
    ]
    owner = "Megatron-FSDP" if entry.engine == "megatron_fsdp" else owner
    low = (
        f"{policy.quant.element(gradient=False)} in quantized linears, {policy.params.short} elsewhere"
        if policy.quant is not None and policy.quant.stored
        else policy.params.short
    )
    return f"{low}; main weights {(policy.main_params or DType.FP32).short} by {owner}"


def _bytes(policy: PrecisionPolicy, entry: Recipe, ranks: int, native: list[str]) -> float:
    engine = entry.engine or "mcore"
    known = {row.name: row for row in machines.values()}
    first = next((known[name] for name in ("H100", "B200") if name in native), None)
    # 16-bit parameters that are their own main copy cannot be sharded by megatron-core's distributed optimizer
    shared = policy.stored or (ranks > 1 and not policy.own_main_copy)
    run = RunFacts(
        shape=_SHAPE,
        parallel=Parallel(world_size=ranks),
        engine=engine,
        optimizer=OptimizerFacts(distributed=shared, name=optimizer_name("adam", policy, engine)),
        ddp={"reuse_grad_buf_for_mxfp8_param_ag": policy.reuse_grad_buffer},
        machine=first,
    )
    return memory(policy, run, rank=0).bytes_per_parameter
