"""Builds the list of operations of one rank of a run: `work`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mpbridge.common.errors import BadValue
from mpbridge.common.facts import RunFacts
from mpbridge.planning.estimate.collectives import (
    Share,
    context_collectives,
    data_collectives,
    expert_collectives,
    least_data_collectives,
    norm_collectives,
    pipeline_collectives,
    shares,
    tensor_collectives,
)
from mpbridge.planning.estimate.gemms import rank_gemms
from mpbridge.planning.estimate.memory_traffic import attention, traffic, weight_bytes
from mpbridge.planning.estimate.work import Collective, Work
from mpbridge.planning.memory.keeps import FROZEN, MOMENTS, elements_of, keeps, trained_by
from mpbridge.planning.memory.limitations import left_out_of_time
from mpbridge.planning.memory.ranks import Chunk, Coordinates, undivided
from mpbridge.precision.policy import PrecisionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The work of a rank that does not depend on micro-batch size and recomputation. It is counted over the parameters, so it is the most expensive part to compute."""

    weights: float
    """Memory traffic of weights and their gradients per micro-batch, in bytes."""
    step: tuple[Collective, ...]
    """Over data-parallel groups, once per step."""
    optimizer: float
    """Bytes that the update reads and writes."""


def standing(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> Standing:
    """The Standing of the rank at those coordinates."""
    held = shares(policy, run, at)
    return Standing(
        weights=weight_bytes(policy, run, at),
        step=(*data_collectives(policy, run, at), *norm_collectives(policy, run, held)),
        optimizer=update(policy, run, held),
    )


def least_standing(policy: PrecisionPolicy, run: RunFacts, held: Sequence[Share]) -> Standing:
    """The Standing of a rank that holds these, without the padding of buffers and without weights."""
    step = (*least_data_collectives(policy, run, held), *norm_collectives(policy, run, held))
    return Standing(weights=0.0, step=step, optimizer=update(policy, run, held))


def work(policy: PrecisionPolicy, run: RunFacts, rank: int, known: Standing | None = None) -> Work:
    """The operations that a rank issues in one step. known: `standing` of a run with the same sizes. Raises BadValue for sizes that do not divide."""
    divisible(run)
    at = Coordinates.of(rank, run.parallel)
    return work_of(policy, run, at, at.chunks(run), known or standing(policy, run, at))


def work_of(
    policy: PrecisionPolicy, run: RunFacts, at: Coordinates, chunks: tuple[Chunk, ...], fixed: Standing
) -> Work:
    """The operations of those model chunks on a rank at these coordinates."""
    gemms = tuple(rank_gemms(policy, run, chunks))
    layers, experts = _layers(run, chunks)
    return Work(
        stage=at.stage,
        layers=layers,
        experts=experts,
        gemms=gemms,
        attention=tuple(attention(run, chunks)),
        traffic=traffic(policy, run, chunks, gemms, fixed.weights),
        collectives=(
            *tensor_collectives(policy, run, chunks),
            *context_collectives(policy, run, layers),
            *expert_collectives(policy, run, experts),
            *pipeline_collectives(policy, run, at),
        ),
        step=fixed.step,
        optimizer=fixed.optimizer,
        offloaded=_offloaded(policy, run, layers),
        left_out=left_out_of_time(run),
    )


def divisible(run: RunFacts) -> None:
    """Raises BadValue, naming every such size, if tensors or batches cannot be divided as the layout requires."""
    faults, batch = [undivided(run)], run.micro_batch_size * run.parallel.data
    if run.global_batch_size % batch:
        faults.append(f"global_batch_size {run.global_batch_size} by micro batch x data parallel {batch}")
    if any(faults):
        raise BadValue(f"cannot be divided: {'; '.join(filter(None, faults))}")


def _layers(run: RunFacts, chunks: tuple[Chunk, ...]) -> tuple[int, int]:
    """(layers, layers with experts) of a stage, including multi-token prediction."""
    built = [layer for chunk in chunks for layer in chunk.built(run.shape)]
    return len(built), sum(map(run.shape.is_expert_layer, built))


def update(policy: PrecisionPolicy, run: RunFacts, held: Iterable[Share]) -> float:
    """Bytes that the optimizer reads and writes: gradients read, main weights and moments read and written, parameters written."""
    settled = policy.settled(dict(run.optimizer.settings))
    main = 4 if settled.main_params is None else settled.main_params.bytes

    @functools.cache
    def each(trained: str) -> tuple[int, int]:
        """Bytes per element of the parameter, and of SOAP's factors."""
        if trained == FROZEN:
            return 0, 0
        kept = keeps(settled, run.traits, run.optimizer, ddp=run.ddp, trained=trained)
        states = sum(kept[role].dtype.bytes for role in MOMENTS if role in kept)
        factors = 2 * kept["factors"].dtype.bytes if "factors" in kept else 0
        return 2 * (main + states) + 4 + policy.params.bytes + policy.reduce.bytes, factors

    found = 0.0
    sharded = run.optimizer.distributed or run.traits.distributed_optimizer != "optional"
    for parameter, elements in held:
        ranks = run.parallel.replicas(expert=parameter.weight.expert)
        trained = trained_by(
            run.optimizer.name, parameter.name, len(parameter.weight.shape), policy, run.versions.megatron_core
        )
        one, factors = each(trained)
        beside = elements_of("factors", parameter.weight.shape, 0) * factors if factors else 0
        found += elements * (one + beside / parameter.weight.elements) / (ranks if sharded else 1)
    return found


def _offloaded(policy: PrecisionPolicy, run: RunFacts, layers: int) -> float:
    """Activations that cpu_offloading moves to the host and back."""
    if not run.model.get("cpu_offloading"):
        return 0.0
    from mpbridge.planning.memory.activations import offloaded

    return 2.0 * offloaded(policy, run, min(layers, int(run.model.get("cpu_offloading_num_layers") or 0)))
