"""Compares a recipe's memory with bf16_mixed's on the same run, with the reasons for differences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mpbridge.common.facts import RunFacts
from mpbridge.common.formats import DType
from mpbridge.common.tables import unit_for
from mpbridge.planning.memory.by_role import Memory, memory
from mpbridge.planning.memory.keeps import MOMENTS, keeps_of
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.registry import recipe
from mpbridge.precision.resolve import resolve

REFERENCE = "bf16_mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two estimates of one run."""

    mine: Memory
    reference: Memory
    reasons: tuple[str, ...]
    """Why states differ, most expensive first; empty if there is nothing to explain."""

    @property
    def difference(self) -> int:
        """Bytes more than the reference (negative: fewer), including activations."""
        return self.mine.total - self.reference.total


def against_bf16(
    policy: PrecisionPolicy,
    run: RunFacts,
    *,
    mine: Memory | None = None,
    reference: tuple[PrecisionPolicy, RunFacts] | None = None,
) -> Comparison:
    """`policy` against bf16_mixed on the rank that holds most under `policy`.

    reference: bf16_mixed's own policy and run, if known; otherwise its policy on this run, without the optimizer settings that the recipe wrote.
    """
    own = mine or memory(policy, run)
    base, base_run = reference or (
        resolve(recipe(REFERENCE).make()),
        replace(run, optimizer=replace(run.optimizer, settings={})),
    )
    other = memory(base, base_run, rank=own.rank)
    return Comparison(mine=own, reference=other, reasons=_reasons(policy, run, own, other))


def _reasons(policy: PrecisionPolicy, run: RunFacts, mine: Memory, other: Memory) -> tuple[str, ...]:
    found: list[tuple[int, str]] = []
    unit = unit_for(max(mine.needed, other.needed))

    def say(role: str, text: str) -> None:
        delta = mine.roles.get(role, 0) - other.roles.get(role, 0)
        if abs(delta) >= 2**20 and text:
            found.append((delta, f"{'+' if delta > 0 else ''}{unit.of(delta)} {unit.name} {role}: {text}"))

    for role, text in _about_quantized_weights(policy, run):
        say(role, text)
    say("weight_scales", "block scales")
    kept = keeps_of(policy, run)
    main_weights = kept.get("main_params")
    if main_weights is None:
        say("main_params", "parameters are their own main copy")
    elif main_weights.owner == "optimizer":
        say(
            "main_params",
            "main weights as 16-bit remainders of BF16 parameters"
            if main_weights.dtype is DType.INT16
            else f"main weights in {main_weights.dtype.short} by FusedAdam",
        )
    for role, name in (*((role, words) for role, (words, _) in MOMENTS.items()), ("grads", "gradient buffers")):
        if role in kept:
            say(role, f"{name} in {kept[role].dtype.short}")
    say("main_grads", "16-bit gradients are cast to FP32 for the update")
    return tuple(text for _, text in sorted(found, key=lambda item: -abs(item[0])))


def _about_quantized_weights(policy: PrecisionPolicy, run: RunFacts) -> Iterator[tuple[str, str]]:
    """(role, why it needs the bytes that it does) if linears are quantized."""
    quant = policy.quant
    if quant is None:
        return
    if quant.stored:
        yield "params", f"weights of the quantized linears are stored in {quant.bits} bits"
        yield (
            "weight_copies",
            "MXFP8 weights are stored outside the buffer, which the gather borrows from the gradients",
        )
    else:
        why = "BF16 weights remain, and a low-precision copy is kept over the micro-batches of a step (fp8_param_gather would keep only one of them)"
        yield "weight_copies", why
    if quant.row.stored.both_copies:
        why = f"{quant.scaling} scales run along the contraction dimension, so the rowwise and columnwise copies differ"
    else:
        name = run.machine.name if run.machine is not None else "Hopper"
        why = f"on {name} FP8 GEMMs support one layout only, so each weight is also kept transposed"
    yield "weight_transposes", why
