"""Bytes on a GPU, by role: exact where megatron-core's layout is followed, marked as an estimate elsewhere. Also finds changes that would make a run fit, and why
it needs more or less than with bf16_mixed."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from mpbridge.common.errors import BadValue
from mpbridge.common.facts import RunFacts
from mpbridge.common.formats import DType
from mpbridge.common.machines import Machine
from mpbridge.common.tables import size as as_text
from mpbridge.common.tables import unit_for
from mpbridge.planning.memory.activations import Known, activations, uncertainty
from mpbridge.planning.memory.identical_layers import distinct_stages
from mpbridge.planning.memory.keeps import MOMENTS, keeps_of, resident
from mpbridge.planning.memory.keeps import STATES as KEPT
from mpbridge.planning.memory.layers import rank_parameters, unsplit
from mpbridge.planning.memory.overheads import Overhead, counted_at_most, outside, overheads, states_counted
from mpbridge.planning.memory.ranks import Coordinates, undivided
from mpbridge.planning.memory.roles import roles
from mpbridge.precision.policy import PrecisionPolicy

STATES = ("params", "grads", *KEPT, "weight_copies", "weight_transposes", "weight_scales", "buffers", "padding")
"""Roles in the order in which tables show them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """What one rank holds regardless of micro-batch size and recomputation, in bytes."""

    rank: int
    roles: Mapping[str, int]
    """Bytes by role, without roles that are absent."""
    elements: int
    """Parameters on this rank before sharding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(States):
    """What one rank holds, in bytes: its states and the rest."""

    stage: int
    activations: int
    """Estimate."""
    overheads: tuple[Overhead, ...]
    """Workspaces and buffers that torch accounts for."""
    outside: tuple[Overhead, ...]
    """Device memory that torch does not account for."""
    uncertainty: float
    """Relative error of `activations` not exceeded in nine of ten measured cases."""
    exact: bool
    """Whether `roles` has every state to the byte."""
    at_most: bool = False
    """Whether the real bytes may be far fewer, so that it is never certain that it does not fit."""

    @property
    def states(self) -> int:
        """Parameters, gradients, optimizer states and buffers."""
        return sum(self.roles.values())

    @property
    def communication(self) -> int:
        """The sum of `overheads`."""
        return sum(part.bytes for part in self.overheads)

    @property
    def total(self) -> int:
        """The peak as torch counts it: states, activations and `overheads`."""
        return self.states + self.communication + self.activations

    @property
    def needed(self) -> int:
        """Device memory needed: `total` plus what torch does not count."""
        return self.total + sum(part.bytes for part in self.outside)

    @property
    def band(self) -> int:
        """Bytes that `needed` may be off: the parts' errors, independent of each other."""
        parts = [part.bytes * part.band for part in (*self.overheads, *self.outside)]
        return int(math.hypot(self.activations * self.uncertainty, *parts))

    @property
    def bytes_per_parameter(self) -> float:
        """States per parameter on this rank."""
        return self.states / max(1, self.elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether it fits, and what would help."""

    answer: Literal["fits", "tight", "does not fit"]
    """"fits" and "does not fit" hold over the whole error band."""
    needed: int
    """Bytes of device memory needed."""
    band: int
    """Error of `needed`, in bytes."""
    available: int
    ways: tuple[str, ...] = ()
    """Settings, to paste, each of which makes it fit on its own; if there are none, those that save the most."""

    @property
    def ok(self) -> bool:
        """False only for "does not fit"."""
        return self.answer != "does not fit"


def memory(policy: PrecisionPolicy, run: RunFacts, *, rank: int | None = None) -> Memory:
    """The bytes of one rank; rank None: of the fullest pipeline stage. Raises BadValue if layers cannot be divided as requested."""
    if rank is not None:
        return with_states(policy, run, states(policy, run, rank))
    return max((with_states(policy, run, held) for held in stage_states(policy, run)), key=lambda one: one.needed)


def fullest(policy: PrecisionPolicy, run: RunFacts, mine: Memory) -> int:
    """The fullest rank: that of `mine` if no other holds more, otherwise the first of the fullest pipeline stage. Raises BadValue if layers cannot be
    divided as requested."""
    most = memory(policy, run)
    return mine.rank if mine.needed >= most.needed else most.rank


def fit(policy: PrecisionPolicy, run: RunFacts, machine: Machine, mine: Memory | None = None) -> Fit:
    """Whether the fullest rank fits on that machine and, if not, what would make it fit. mine: `memory`, if it is known."""
    mine, available = mine or memory(policy, run), machine.memory_bytes
    said = verdict(mine, available)
    if said == "fits":
        return Fit(answer=said, needed=mine.needed, band=mine.band, available=available)
    tried = []
    for words, other_policy, other_run in _alternatives(policy, run):
        other = memory(other_policy, other_run)
        if other.needed < mine.needed:
            tried.append((other.needed, words, verdict(other, available)))
    enough = [f"{words} ({as_text(size)})" for size, words, answer in sorted(tried) if answer == "fits"]
    alone = {"tight": "tight", "does not fit": "not enough alone"}
    most = [f"{words} ({as_text(size)}, {alone[answer]})" for size, words, answer in sorted(tried)[:3] if not enough]
    return Fit(answer=said, needed=mine.needed, band=mine.band, available=available, ways=tuple(enough or most))


def verdict(one: Memory, available: int) -> Literal["fits", "tight", "does not fit"]:
    """Whether a rank fits into `available` bytes (0: unknown, so "fits"). If the states alone exceed them, it does not fit, whatever the band; what is smaller than
    it is counted may fit."""
    if not available or one.needed + one.band <= available:
        return "fits"
    if not one.at_most and (one.states > available or one.needed - one.band > available):
        return "does not fit"
    return "tight"


def total_parameters(run: RunFacts) -> int:
    """Parameters of the whole model, each counted once."""
    alone = unsplit(run)
    return sum(p.weight.elements for p in rank_parameters(alone, Coordinates.of(0, alone.parallel)))


def duplicate_main(run: RunFacts, *, rank: int = 0) -> int:
    """Bytes of one more FP32 copy of a rank's share of the weights: what a FusedAdam with main weights wastes if the engine has its own."""
    at, ranks = Coordinates.of(rank, run.parallel), run.sharers
    return 4 * sum(-(-p.weight.elements // ranks(expert=p.weight.expert)) for p in rank_parameters(run, at))


def states(policy: PrecisionPolicy, run: RunFacts, rank: int) -> States:
    """What a rank holds between updates."""
    found: Counter[str] = Counter()
    for role in roles(policy, run, rank=rank, together=True):
        found[role.name] += int(role.bytes * (resident(run) if role.name in KEPT else 1))
    return States(
        rank=rank,
        roles=MappingProxyType({name: found[name] for name in STATES if found[name]}),
        elements=sum(p.weight.elements for p in rank_parameters(run, Coordinates.of(rank, run.parallel))),
    )


def stage_states(policy: PrecisionPolicy, run: RunFacts) -> list[States]:
    """States of the first rank of each kind of pipeline stage: among identical stages the first has the most micro-batches in flight."""
    every = run.parallel.world_size // run.parallel.pipeline
    return [states(policy, run, stage * every) for stage in distinct_stages(policy, run)]


def with_states(
    policy: PrecisionPolicy, run: RunFacts, held: States, known: Known | None = None, *, every: bool = True
) -> Memory:
    """The memory of the rank that holds those states. held: from a run with the same sizes, regardless of micro-batch size and recomputation.

    known: for `activations`. every: without it overheads that depend on single parameters are left out."""
    at = Coordinates.of(held.rank, run.parallel)
    return Memory(
        rank=held.rank,
        stage=at.stage,
        roles=held.roles,
        activations=(kept := activations(policy, run, at, known)),
        overheads=overheads(policy, run, at, every=every),
        outside=outside(policy, run, kept),
        uncertainty=uncertainty(run),
        elements=held.elements,
        exact=run.traits.exact_memory and states_counted(run),
        at_most=counted_at_most(run),
    )


def _alternatives(policy: PrecisionPolicy, run: RunFacts) -> Iterator[tuple[str, PrecisionPolicy, RunFacts]]:
    """(settings, policy, run) for each usual way of saving memory that this run does not use yet and that its world size allows."""
    parallel, optimizer = run.parallel, run.optimizer
    if not optimizer.distributed and run.traits.distributed_optimizer == "optional" and parallel.data > 1:
        yield "ddp.use_distributed_optimizer=true", policy, replace(run, optimizer=replace(optimizer, distributed=True))
    # with quantized GEMMs the precision-aware optimizer failed on several releases (rule precision-aware-with-fp8)
    if not policy.precision_aware and optimizer.distributed and policy.compute is DType.BF16 and not policy.quantized:
        lower = replace(policy, precision_aware=True, main_params=DType.FP32, exp_avg=DType.BF16, exp_avg_sq=DType.BF16)
        states = {"main_params": "fp32", "exp_avg": "bf16", "exp_avg_sq": "bf16"}
        words = " ".join(f"mixed_precision.{name}_dtype={dtype}" for name, dtype in states.items())
        yield f"mixed_precision.use_precision_aware_optimizer=true {words}", lower, run
    if run.model.get("recompute_granularity") != "full":
        settings = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        words = " ".join(f"model.{name}={value}" for name, value in settings.items())
        yield words, policy, replace(run, model={**run.model, **settings})
    # SwiGLU as several kernels, each of which keeps its inputs, could be one
    kind = getattr(run.model.get("activation_func"), "__name__", run.model.get("activation_func"))
    fused = run.model.get("bias_activation_fusion") or run.model.get("use_te_activation_func")
    if run.shape.gated and kind == "silu" and not fused:
        model = {**run.model, "bias_activation_fusion": True}
        yield "model.bias_activation_fusion=true", policy, replace(run, model=model)
    if run.micro_batch_size > 1:
        yield "train.micro_batch_size=1", policy, replace(run, micro_batch_size=1)
    for words, changed in _layouts(run):
        with contextlib.suppress(BadValue):  # the world is no multiple of them
            sizes = replace(parallel, **changed)
            # a placement of layers on stages is valid only for that number of stages
            other = unsplit(run, sizes) if "pipeline" in changed else replace(run, parallel=sizes)
            if not undivided(other):
                yield words, policy, other


def _layouts(run: RunFacts) -> Iterator[tuple[str, dict[str, Any]]]:
    """(settings, what they change) for twice the tensor, pipeline or expert parallelism."""
    sizes, shape = run.parallel, run.shape
    tensor, pipeline, expert = sizes.tensor * 2, sizes.pipeline * 2, sizes.expert * 2
    if tensor <= 8:
        words = f"parallel.tensor_model_parallel_size={tensor} parallel.sequence_parallel=true"
        yield words, {"tensor": tensor, "sequence": True}
    if shape.num_layers % pipeline == 0:
        words = f"parallel.pipeline_model_parallel_size={pipeline}"
        yield words, {"pipeline": pipeline, "virtual_pipeline": None}
    if shape.experts:
        yield f"parallel.expert_model_parallel_size={expert}", {"expert": expert}


REFERENCE = "bf16_mixed"


def reasons(policy: PrecisionPolicy, run: RunFacts, mine: Memory, other: Memory) -> tuple[str, ...]:
    """Why the states of `mine`, which is of that policy, differ from those of `other`, of REFERENCE: the most expensive first; empty if there is nothing to explain."""
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
    main = kept.get("main_params")
    if main is None:
        say("main_params", "parameters are their own main copy")
    elif main.dtype is DType.INT16:
        say("main_params", "main weights as 16-bit remainders of BF16 parameters")
    elif main.owner == "optimizer":
        say("main_params", f"main weights in {main.dtype.short} by FusedAdam")
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
        why = "MXFP8 weights are stored outside the buffer, which the gather borrows from the gradients"
    else:
        why = "BF16 weights remain, and a low-precision copy is kept over the micro-batches of a step (fp8_param_gather would keep only one of them)"
    yield "weight_copies", why
    if quant.row.stored.both_copies:
        why = f"{quant.scaling} scales run along the contraction dimension, so the rowwise and columnwise copies differ"
    else:
        name = run.machine.name if run.machine is not None else "Hopper"
        why = f"on {name} FP8 GEMMs support one layout only, so each weight is also kept transposed"
    yield "weight_transposes", why
