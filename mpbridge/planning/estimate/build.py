"""Builds the list of operations of one rank of a run: `work`. Its communication in one step: kind, group, dtype, bytes and count, as megatron-core 0.16 issues it.

Tensor parallelism: tensor_parallel/layers.py (sequence parallelism gathers a column-parallel linear's input again in backward), cross_entropy.py (three
reductions of FP32 vectors). Data parallelism: distributed/param_and_grad_buffer.py (each bucket once per step). Pipeline: pipeline_parallel/schedules.py."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mpbridge.common.errors import BadValue
from mpbridge.common.facts import RunFacts
from mpbridge.common.formats import DType
from mpbridge.planning.estimate.gemms import rank_gemms
from mpbridge.planning.estimate.memory_traffic import attention, traffic, weight_bytes
from mpbridge.planning.estimate.price import Collective, Work
from mpbridge.planning.memory.activations import layers_again
from mpbridge.planning.memory.buckets import Buffer, empty
from mpbridge.planning.memory.identical_layers import counted
from mpbridge.planning.memory.keeps import FROZEN, MOMENTS, elements_of, is_frozen, keeps, kept_fp32, trained_by, wires
from mpbridge.planning.memory.layers import Parameter
from mpbridge.planning.memory.ranks import Chunk, Coordinates, batches, undivided
from mpbridge.planning.memory.roles import chunk_buffers, holdings, resting
from mpbridge.precision.policy import PrecisionPolicy


def tensor_collectives(policy: PrecisionPolicy, run: RunFacts, chunks: tuple[Chunk, ...]) -> Iterator[Collective]:
    """Per micro-batch, over the tensor-parallel group."""
    ranks = run.parallel.tensor
    if ranks == 1:
        return
    rows, hidden, wide = run.tokens, run.shape.hidden_size, policy.compute
    whole = rows * hidden * wide.bytes
    gathers, reductions = _counts(run, chunks)
    if run.parallel.sequence:
        for kind, times, size in (("all_gather", gathers, whole // ranks), ("reduce_scatter", reductions, whole)):
            if times:
                yield _collective(kind, "tensor", ranks, wide, size, times)
    elif reductions:
        yield _collective("all_reduce", "tensor", ranks, wide, whole, reductions)
    heads = sum(chunk.heads(run.shape) for chunk in chunks)
    if heads:
        yield _collective("all_reduce", "tensor", ranks, DType.FP32, rows * 4, 3 * heads)


def _counts(run: RunFacts, chunks: tuple[Chunk, ...]) -> tuple[int, int]:
    """(all-gathers, reduce-scatters); without sequence parallelism, reductions only."""
    gathers = reductions = 0
    sequence = run.parallel.sequence
    for chunk in chunks:
        again = layers_again(run, chunk)
        for repeated, layer in zip(again, chunk.built(run.shape), strict=True):
            # a pair of linears in each part; of experts only the shared one is split so
            pairs = sum(part != "experts" or run.shape.shared_expert_size > 0 for part in run.shape.parts(layer))
            # gathers: forward, backward, and the input again for the weight gradient
            gathers += (3 + repeated) * pairs
            reductions += (2 + repeated) * pairs
        # a prediction layer embeds its tokens too, and joins them with its input in a projection of twice the width
        ahead, heads = chunk.ahead(run.shape), chunk.heads(run.shape)
        gathers += 6 * ahead + 2 * sum(again[len(chunk.layers) :]) + sequence * (chunk.first + ahead) + 2 * heads
        reductions += 2 * ahead + chunk.first + ahead + heads
    return gathers, reductions


def context_collectives(policy: PrecisionPolicy, run: RunFacts, chunks: tuple[Chunk, ...]) -> Iterator[Collective]:
    """What attention sends over context-parallel ranks: keys and values in forward, and with their gradients in backward, around a ring or gathered; or by a2a
    queries, keys, values and results, and their gradients (Transformer Engine's context_parallel.py)."""
    ranks, shape = run.parallel.context, run.shape
    if ranks == 1:
        return
    given = run.model.get("cp_comm_type") or "p2p"
    layers = [layer for chunk in chunks for layer in chunk.built(shape) if "attention" in shape.parts(layer)]
    ways = Counter(given if isinstance(given, str) else given[layer] for layer in layers)
    latent, queries = shape.latent_attention, 0
    if latent is not None:
        pairs, results = shape.attention_width, shape.num_attention_heads * latent["v_head_dim"]
        queries = pairs - results
    else:
        # fewer groups than tensor-parallel ranks: each has one
        pairs = 2 * max(shape.num_query_groups, run.parallel.tensor) * shape.kv_channels
        queries = shape.num_attention_heads * shape.kv_channels
        results = queries
    each = run.tokens * policy.compute.bytes / run.parallel.tensor
    for way, count in ways.items():
        if way == "a2a":
            size = int(each * (queries + pairs + results))
            yield _collective("all_to_all", "context", ranks, policy.compute, size, 2 * count)
        else:
            yield _collective("send", "context", ranks, policy.compute, int(each * pairs), 3 * (ranks - 1) * count)


def expert_collectives(policy: PrecisionPolicy, run: RunFacts, experts: int) -> Iterator[Collective]:
    """Dispatch of tokens to their experts and back, forward and backward, in a micro-batch with a balanced router (moe/token_dispatcher.py)."""
    parallel, width = run.parallel, run.parallel.expert_width
    wide, each = policy.compute, run.shape.expert_hidden_size * policy.compute.bytes
    rows, ranks = run.tokens // parallel.tensor, parallel.expert * width
    if not experts or ranks == 1:
        return
    if run.dispatcher == "allgather":
        # every rank gets every token, and adds up what its experts made of them
        yield _collective("all_gather", "expert", ranks, wide, rows * each, 2 * experts)
        yield _collective("reduce_scatter", "expert", ranks, wide, rows * each * ranks, 2 * experts)
        return
    rows = int(rows * run.routed)
    if parallel.expert > 1:
        yield _collective("all_to_all", "expert", parallel.expert, wide, rows * each, 4 * experts)
        # the router's probabilities are sent with the tokens
        exact = policy.router is DType.FP32 or run.model.get("moe_router_dtype") == "fp32"
        probabilities = DType.FP32 if exact else wide
        size = rows * probabilities.bytes
        yield _collective("all_to_all", "expert", parallel.expert, probabilities, size, 2 * experts)
    if width > 1:
        # the ranks that split an expert each need all of its rows
        yield _collective("all_gather", "expert", width, wide, rows * each, 2 * experts)
        yield _collective("reduce_scatter", "expert", width, wide, rows * each * width, 2 * experts)


def pipeline_collectives(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> Iterator[Collective]:
    """Activations and their gradients between stages, per micro-batch: each model chunk sends once."""
    stages = run.parallel.pipeline
    if stages == 1:
        return
    virtual = run.parallel.virtual_pipeline or 1
    rows = run.tokens // run.parallel.sequence_width
    size = rows * run.shape.hidden_size * policy.pipeline.bytes
    times = 2 * virtual - (at.stage == 0) - (at.stage == stages - 1)  # onward and back
    for kind in ("send", "receive") if times else ():
        yield _collective(kind, "pipeline", stages, policy.pipeline, size, times)


def data_collectives(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> Iterator[Collective]:
    """Gradients and parameters over data-parallel groups, once per step: each buffer as a whole, regardless of its buckets."""
    if "params" in run.traits.shards:
        yield from _sharded(policy, run, shares(policy, run, at))
        return
    settled = policy.settled(dict(run.optimizer.settings))
    for index in range(len(at.chunks(run))):
        for buffer in chunk_buffers(settled, run, at, index):
            yield from _buffer(run, buffer, buffer.elements)


def least_data_collectives(policy: PrecisionPolicy, run: RunFacts, held: Sequence[Share]) -> Iterator[Collective]:
    """`data_collectives` of a rank that holds these, without the padding of its buffers."""
    if "params" in run.traits.shards:
        yield from _sharded(policy, run, held)
        return
    settled, found = policy.settled(dict(run.optimizer.settings)), Counter[tuple[bool, DType, DType]]()
    of, rests = holdings(settled, run), resting(settled, run)
    for parameter, elements in held:
        if not is_frozen(policy, parameter.name):
            stored = rests(parameter)[0]
            apart = parameter.weight.expert and run.parallel.expert > 1
            found[apart, stored, of(stored)["grads"].dtype] += elements
    for (apart, stored, grads), elements in found.items():
        yield from _buffer(run, empty(run, stored, grads, apart=apart), elements)


def _buffer(run: RunFacts, buffer: Buffer, elements: int) -> Iterator[Collective]:
    """What is sent of a buffer of so many elements."""
    group = "expert_data" if buffer.apart else "data"
    if buffer.group * run.instances == 1 or not elements:
        return
    size = elements * buffer.grads.bytes
    if not buffer.distributed:
        yield _collective("all_reduce", group, buffer.group, buffer.grads, size)
        return
    yield _collective("reduce_scatter", group, buffer.group, buffer.grads, size)
    if run.instances > 1:  # each has the whole, and adds up its shards with the others'
        yield _collective("all_reduce", group, run.instances, buffer.grads, size // buffer.group)
    yield _collective("all_gather", group, buffer.group, buffer.params, elements * buffer.params.bytes // buffer.group)


Share = tuple[Parameter, int]
"""(one parameter, the elements of all that are like it)."""


def shares(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> list[Share]:
    """What a rank holds, parameters of identical layers together."""
    return [(one, times * one.weight.elements) for one, times in counted(policy, run, at)]


def embedding_collectives(policy: PrecisionPolicy, run: RunFacts, held: Iterable[Share]) -> Iterator[Collective]:
    """The gradient of an embedding with a copy on another stage, which the stages add up once per step (finalize_model_grads.py)."""
    size = sum(elements for one, elements in held if one.weight.twin and not is_frozen(policy, one.name))
    if size:
        wire = wires(policy)["gradients"]
        yield _collective("all_reduce", "embedding", 2, wire, size * wire.bytes)


_WHOLE_BIASES = ("linear_proj.bias", "linear_fc2.bias", "mlp.router.weight", "mlp.router.bias")


def norm_collectives(policy: PrecisionPolicy, run: RunFacts, held: Iterable[Share]) -> Iterator[Collective]:
    """Gradients of parameters that are replicated over tensor-parallel ranks, each of which processes only its part of the sequence (finalize_model_grads.py)."""
    if run.parallel.tensor == 1 or not run.parallel.sequence:
        return
    size = sum(elements for one, elements in held if not is_frozen(policy, one.name) and whole_gradient(one))
    wire = wires(policy)["gradients"]
    yield _collective("all_reduce", "tensor", run.parallel.tensor, wire, size * wire.bytes)


def whole_gradient(parameter: Parameter) -> bool:
    """Whether every tensor-parallel rank has the whole parameter, and the gradient of its part of the sequence."""
    weight = parameter.weight
    # a mixer's norm is split like the channels that it normalises
    return weight.module != "mixer.norm" and ("norm" in weight.module or weight.path.endswith(_WHOLE_BIASES))


def _collective(kind: str, group: str, ranks: int, dtype: DType, size: int, times: int = 1) -> Collective:
    """size: bytes of one rank's part, as `Collective.bytes`."""
    return Collective(kind=kind, group=group, ranks=ranks, dtype=dtype.short, bytes=size, times=times)  # type: ignore[arg-type]


def _sharded(policy: PrecisionPolicy, run: RunFacts, held: Iterable[Share]) -> Iterator[Collective]:
    """Sharding by the engine: weights that are sharded are gathered for forward and again for backward of each micro-batch, others once per step; gradients are
    reduce-scattered in each micro-batch where they are sharded, otherwise once."""
    ranks = run.parallel.data * run.parallel.context
    if ranks == 1:
        return
    gathers = 2 * batches(run) if run.sharded("params") else 1
    reductions = batches(run) if run.sharded("grads") else 1
    gathered: Counter[DType] = Counter()
    reduced: Counter[DType] = Counter()
    rests = resting(policy, run)
    for parameter, elements in held:
        wire = wires(policy, at_rest=rests(parameter)[0], kept=kept_fp32(policy, parameter.name))
        gathered[wire["parameters"]] += elements
        if not is_frozen(policy, parameter.name):
            reduced[wire["gradients"]] += elements
    for dtype, count in gathered.items():
        yield _collective("all_gather", "data", ranks, dtype, count * dtype.bytes // ranks, gathers)
    for dtype, count in reduced.items():
        yield _collective("reduce_scatter", "data", ranks, dtype, count * dtype.bytes, reductions)


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
    step = (
        *data_collectives(policy, run, at),
        *norm_collectives(policy, run, held),
        *embedding_collectives(policy, run, held),
    )
    return Standing(weights=weight_bytes(policy, run, at), step=step, optimizer=update(policy, run, held))


def least_standing(policy: PrecisionPolicy, run: RunFacts, held: Sequence[Share]) -> Standing:
    """The Standing of a rank that holds these, without the padding of buffers and without weights."""
    step = *least_data_collectives(policy, run, held), *norm_collectives(policy, run, held)
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
        layers=layers,
        experts=experts,
        gemms=gemms,
        attention=tuple(attention(run, chunks)),
        traffic=traffic(policy, run, chunks, gemms, fixed.weights),
        collectives=(
            *tensor_collectives(policy, run, chunks),
            *context_collectives(policy, run, chunks),
            *expert_collectives(policy, run, experts),
            *pipeline_collectives(policy, run, at),
        ),
        step=fixed.step,
        optimizer=fixed.optimizer,
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
        ranks = run.sharers(expert=parameter.weight.expert)
        shape, core = parameter.weight.shape, run.versions.megatron_core
        one, factors = each(trained_by(run.optimizer.name, parameter.name, len(shape), policy, core))
        beside = elements_of("factors", shape, 0) * factors if factors else 0
        found += elements * (one + beside / parameter.weight.elements) / (ranks if sharded else 1)
    return found
