"""Which parallel layouts of a model are legal, fit and are fast on a number of GPUs: `search`, and `nearest` for a run that does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from mpbridge.errors import MpbridgeError
from mpbridge.estimate.build import divisible
from mpbridge.estimate.constants import Constants, constants
from mpbridge.estimate.step import distinct_stages, ideal, seconds
from mpbridge.facts import Parallel, RunFacts
from mpbridge.hardware.machines import Machine
from mpbridge.memory.budget import Memory, memory, verdict
from mpbridge.memory.layers import unsplit
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.rules.table import broken

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_NONE = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to run a model."""

    run: RunFacts
    needed: int
    """Bytes of the fullest GPU."""
    band: int
    answer: str
    """"fits" or "tight"."""
    seconds: float
    """Predicted step."""
    tokens_per_second: float
    """Of one GPU, predicted."""

    @property
    def line(self) -> str:
        """Settings to paste behind a command."""
        return line(self.run)


def line(run: RunFacts) -> str:
    """The run's layout as settings to paste behind a command."""
    sizes, parts = run.parallel, []
    for name, value in (
        ("tensor_model", sizes.tensor), ("pipeline_model", sizes.pipeline), ("virtual_pipeline_model", sizes.virtual_pipeline or "null"),
        ("context", sizes.context), ("expert_model", sizes.expert),
    ):  # fmt: skip
        parts.append(f"parallel.{name}_parallel_size={value}")
    if run.shape.experts:
        parts.append(f"parallel.expert_tensor_parallel_size={sizes.expert_tensor or 'null'}")
    parts.append(f"parallel.sequence_parallel={str(sizes.sequence).lower()}")
    parts.append(f"train.micro_batch_size={run.micro_batch_size}")
    for name in (
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout",
    ):
        parts.append(f"model.{name}={run.model.get(name) or 'null'}")
    for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        parts.append(f"model.{name}={str(bool(run.model.get(name))).lower()}")
    full = run.model.get("recompute_granularity") == "full"
    parts += [
        f"model.{name}={value if value is not None else 'null'}"
        for name, value in (FULL if full else {"recompute_granularity": None}).items()
    ]
    parts.append(f"ddp.use_distributed_optimizer={str(run.optimizer.distributed).lower()}")
    return " ".join(parts)


def search(
    policy: PrecisionPolicy, run: RunFacts, machine: Machine, *, most: int = 10, using: Constants | None = None
) -> tuple[Layout, ...]:
    """The fastest layouts of that world that are legal and not refused by memory, fastest first; empty when there is none."""
    found = []
    for candidate in candidates(policy, run, machine):
        try:
            held = _fullest(policy, candidate)
            answer = verdict(held, machine.memory_bytes)
            if answer == "does not fit":
                continue
            made = ideal(policy, candidate, machine)
        except MpbridgeError:
            continue
        time = sum(seconds(made, using or constants()).values())
        found.append(
            Layout(
                run=candidate,
                needed=held.needed,
                band=held.band,
                answer=answer,
                seconds=time,
                tokens_per_second=made.tokens / time,
            )
        )
    found.sort(key=lambda one: (one.seconds, one.needed))
    legal = []
    for one in found:
        if not any(violation.severity == "error" for violation in broken(policy, one.run)):
            legal.append(one)
        if len(legal) == most:
            break
    return tuple(legal)


def nearest(policy: PrecisionPolicy, run: RunFacts, machine: Machine) -> RunFacts | None:
    """The layout on the fewest GPUs, from this run's number on, that memory says fits; the one that changes least first. None: none up to 64 times as
    many GPUs."""
    here = run.parallel
    # the author's own placement of layers on stages, which the search does not look for
    again = dataclasses.replace(run, model={**run.model, **FULL})
    if verdict(_fullest(policy, again), machine.memory_bytes) == "fits":
        return again
    for factor in (1, 2, 4, 8, 16, 32, 64):
        wider = dataclasses.replace(run, parallel=dataclasses.replace(here, world_size=here.world_size * factor))
        if run.global_batch_size % max(1, run.micro_batch_size * wider.parallel.data):
            wider = dataclasses.replace(wider, global_batch_size=run.global_batch_size * factor)
        for candidate in sorted(candidates(policy, wider, machine), key=lambda one: _distance(run, one)):
            try:
                if verdict(_fullest(policy, candidate), machine.memory_bytes) == "fits" and not any(
                    violation.severity == "error" for violation in broken(policy, candidate)
                ):
                    return candidate
            except MpbridgeError:
                continue
    return None


def _distance(run: RunFacts, other: RunFacts) -> tuple[int, int, int]:
    a, b = run.parallel, other.parallel
    pairs = ((a.tensor, b.tensor), (a.pipeline, b.pipeline), (a.context, b.context), (a.expert, b.expert))
    changed = sum(x != y for x, y in pairs)
    again = run.model.get("recompute_granularity") != other.model.get("recompute_granularity")
    return (
        changed + 2 * again,
        sum(max(x, y) // min(x, y) for x, y in pairs),
        abs(run.micro_batch_size - other.micro_batch_size),
    )


def candidates(policy: PrecisionPolicy, run: RunFacts, machine: Machine) -> Iterator[RunFacts]:
    """Layouts of that world whose sizes divide and whose states may fit."""
    world = run.parallel.world_size
    sharded = "params" in run.traits.shards
    for tensor in (1,) if sharded else _powers(min(8, machine.domain)):
        for pipeline in (1,) if sharded else _powers(64):
            for context in (1,) if sharded else _powers(max(1, run.shape.seq_length // 4096)):
                if world % (tensor * pipeline * context):
                    continue
                for expert in _experts(run, world // (tensor * pipeline * context) * tensor * context):
                    for virtual in _virtual(run, pipeline):
                        yield from _batches(policy, run, machine, tensor, pipeline, context, expert, virtual)


def _batches(
    policy: PrecisionPolicy,
    run: RunFacts,
    machine: Machine,
    tensor: int,
    pipeline: int,
    context: int,
    expert: int,
    virtual: int | None,
) -> Iterator[RunFacts]:
    sizes = Parallel(
        world_size=run.parallel.world_size,
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=virtual,
        context=context,
        expert=expert,
        expert_tensor=1 if run.shape.experts else None,
        sequence=tensor > 1,
    )
    if run.global_batch_size % sizes.data:
        return
    model = {**unsplit(run, sizes).model, **_NONE}
    if pipeline > 1 and run.shape.num_layers % (pipeline * (virtual or 1)):
        model |= {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    optimizer = dataclasses.replace(run.optimizer, distributed=run.optimizer.distributed or sizes.data > 1)
    base = dataclasses.replace(run, parallel=sizes, model=model, optimizer=optimizer, micro_batch_size=1)
    if _states_at_least(policy, base) > machine.memory_bytes:
        return
    try:
        divisible(base)
    except MpbridgeError:
        return
    for micro in (1, 2, 4):
        each = run.global_batch_size // sizes.data
        if (
            each % micro
            or (pipeline > 1 and each // micro < pipeline)
            or ((virtual or 1) > 1 and each // micro % pipeline)
        ):
            continue
        for recompute in (_NONE, FULL):
            yield dataclasses.replace(base, micro_batch_size=micro, model={**model, **recompute})


def _states_at_least(policy: PrecisionPolicy, run: RunFacts) -> float:
    """Parameters and gradients of an average stage: less than any GPU holds at its fullest."""
    shape, sizes = run.shape, run.parallel
    gates = 3 if shape.gated else 2
    dense = experts = 0
    for layer in range(shape.num_layers):
        dense += (
            shape.hidden_size * shape.kv_channels * (2 * shape.num_attention_heads)
            if shape.latent_attention is None
            else 0
        )
        if shape.is_expert_layer(layer):
            experts += gates * shape.hidden_size * shape.expert_ffn_hidden_size * (shape.experts or 0)
        else:
            dense += gates * shape.hidden_size * shape.ffn_hidden_size
    each = policy.params.bytes / (2 if policy.stored else 1) + policy.reduce.bytes
    if "params" in run.traits.shards:
        each /= sizes.data
    return (
        (dense / sizes.tensor + experts / sizes.expert / (sizes.expert_tensor or sizes.tensor)) / sizes.pipeline * each
    )


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def _experts(run: RunFacts, ranks: int) -> list[int]:
    """Expert-parallel sizes: those that leave a GPU at most 16 experts, the three smallest of them; else the largest that divides."""
    if not run.shape.experts:
        return [1]
    found = [
        size for size in _powers(min(run.shape.experts, ranks)) if run.shape.experts % size == 0 and ranks % size == 0
    ]
    return [size for size in found if run.shape.experts // size <= 16][:3] or found[-1:]


def _virtual(run: RunFacts, pipeline: int) -> list[int | None]:
    """Without interleaving, and two ways with it, where layers divide (an embedding and a loss may count as layers)."""
    if pipeline == 1:
        return [None]
    found: list[int | None] = []
    for count in (1, 2, 4, 8):
        if any(total % (pipeline * count) == 0 for total in (run.shape.num_layers, run.shape.num_layers + 2)):
            found.append(count if count > 1 else None)
    return [*found[:1], *found[-1:]] if len(found) > 1 else found


def _fullest(policy: PrecisionPolicy, run: RunFacts) -> Memory:
    """The fullest of the stages that differ from those before them."""
    every = run.parallel.world_size // run.parallel.pipeline
    return max(
        (memory(policy, run, rank=stage * every) for stage in distinct_stages(policy, run)), key=lambda one: one.needed
    )
