"""The communication of a rank in one step: kind, group, dtype, bytes and count, as megatron-core 0.16 issues it.

Tensor parallelism: tensor_parallel/layers.py (sequence parallelism gathers a column-parallel linear's input again in backward), cross_entropy.py (three
reductions of FP32 vectors). Data parallelism: distributed/param_and_grad_buffer.py (each bucket once per step). Pipeline: pipeline_parallel/schedules.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mpbridge.common.facts import RunFacts
from mpbridge.common.formats import DType
from mpbridge.planning.estimate.gemms import full_layers
from mpbridge.planning.estimate.work import Collective
from mpbridge.planning.memory.identical_layers import counted
from mpbridge.planning.memory.keeps import is_frozen, kept_fp32, wires
from mpbridge.planning.memory.layers import parameters, rank_parameters
from mpbridge.planning.memory.ranks import Chunk, Coordinates, batches
from mpbridge.planning.memory.roles import chunk_buffers, resting
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
        again = full_layers(run, len(chunk.layers))
        # a pair of linears in each part but experts; gathers: forward, backward, and the input again for the weight gradient
        pairs = sum(part != "experts" for layer in chunk.layers for part in run.shape.parts(layer))
        gathers += 3 * pairs + 2 * again
        reductions += 2 * pairs + 2 * again
        if chunk.first:
            gathers += int(sequence)
            reductions += 1
        if chunk.last:
            gathers += 2
            reductions += 1
    return gathers, reductions


def context_collectives(policy: PrecisionPolicy, run: RunFacts, layers: int) -> Iterator[Collective]:
    """Keys and values around the context-parallel ring: in forward, and with their gradients in backward."""
    ranks, shape = run.parallel.context, run.shape
    if ranks == 1 or not layers:
        return
    width = 2 * shape.num_query_groups * shape.kv_channels // run.parallel.tensor
    size = run.tokens * width * policy.compute.bytes
    yield _collective("send", "context", ranks, policy.compute, size, 3 * (ranks - 1) * layers)


def expert_collectives(policy: PrecisionPolicy, run: RunFacts, experts: int) -> Iterator[Collective]:
    """Dispatch of tokens to their experts and back, forward and backward, in a micro-batch with a balanced router."""
    parallel, shape = run.parallel, run.shape
    if parallel.expert * parallel.expert_width == 1 or not experts:
        return
    rows = run.tokens // parallel.tensor * shape.expert_topk
    if parallel.expert > 1:
        size = rows * shape.expert_hidden_size * policy.compute.bytes
        yield _collective("all_to_all", "expert", parallel.expert, policy.compute, size, 4 * experts)
        # the router's probabilities are sent with the tokens
        exact = policy.router is DType.FP32 or run.model.get("moe_router_dtype") == "fp32"
        wide = DType.FP32 if exact else policy.compute
        yield _collective("all_to_all", "expert", parallel.expert, wide, rows * wide.bytes, 2 * experts)


def pipeline_collectives(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> Iterator[Collective]:
    """Activations and their gradients between stages, per micro-batch: each model chunk sends once."""
    stages = run.parallel.pipeline
    if stages == 1:
        return
    virtual = run.parallel.virtual_pipeline or 1
    rows = run.tokens // run.parallel.sequence_width
    size = rows * run.shape.hidden_size * policy.pipeline.bytes
    first, last = at.stage == 0, at.stage == stages - 1
    onward = virtual - int(last)
    back = virtual - int(first)
    for kind, times in (("send", onward + back), ("receive", onward + back)):
        if times:
            yield _collective(kind, "pipeline", stages, policy.pipeline, size, times)


def data_collectives(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> Iterator[Collective]:
    """Gradients and parameters over data-parallel groups, once per step: each buffer as a whole, regardless of its buckets."""
    if "params" in run.traits.shards:
        yield from _sharded(policy, run, at)
        return
    settled = policy.settled(dict(run.optimizer.settings))
    for index, chunk in enumerate(parameters(run, at)):
        for buffer in chunk_buffers(settled, run, at, chunk, index):
            group = "expert_data" if buffer.apart else "data"
            if buffer.group == 1 or not buffer.elements:
                continue
            size = buffer.elements * buffer.grads.bytes
            if not buffer.distributed:
                yield _collective("all_reduce", group, buffer.group, buffer.grads, size)
                continue
            yield _collective("reduce_scatter", group, buffer.group, buffer.grads, size)
            yield _collective(
                "all_gather", group, buffer.group, buffer.params, buffer.elements * buffer.params.bytes // buffer.group
            )


_WHOLE_BIASES = ("linear_proj.bias", "linear_fc2.bias", "mlp.router.weight", "mlp.router.bias")


def norm_collectives(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> Iterator[Collective]:
    """Gradients of parameters that are replicated over tensor-parallel ranks, each of which processes only its part of the sequence (finalize_model_grads.py)."""
    if run.parallel.tensor == 1 or not run.parallel.sequence:
        return
    size = sum(
        times * parameter.weight.elements
        for parameter, times in counted(policy, run, at)
        if not is_frozen(policy, parameter.name)
        and parameter.weight.module != "mixer.norm"  # split like the channels that it normalises
        and ("norm" in parameter.weight.module or parameter.weight.path.endswith(_WHOLE_BIASES))
    )
    wire = wires(policy)["gradients"]
    yield _collective("all_reduce", "tensor", run.parallel.tensor, wire, size * wire.bytes)


def _collective(kind: str, group: str, ranks: int, dtype: DType, size: int, times: int = 1) -> Collective:
    """size: bytes of one rank's part, as `Collective.bytes`."""
    return Collective(kind=kind, group=group, ranks=ranks, dtype=dtype.short, bytes=size, times=times)  # type: ignore[arg-type]


def _sharded(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> Iterator[Collective]:
    """Full sharding: in each micro-batch weights are gathered for forward and again for backward, and gradients are reduce-scattered."""
    ranks = run.parallel.data * run.parallel.context
    if ranks == 1:
        return
    micro = batches(run)
    gathered: Counter[DType] = Counter()
    reduced: Counter[DType] = Counter()
    rests = resting(policy, run)
    for parameter in rank_parameters(run, at):
        wire = wires(policy, at_rest=rests(parameter)[0], kept=kept_fp32(policy, parameter.name))
        gathered[wire["parameters"]] += parameter.weight.elements
        if not is_frozen(policy, parameter.name):
            reduced[wire["gradients"]] += parameter.weight.elements
    for dtype, count in gathered.items():
        yield _collective("all_gather", "data", ranks, dtype, count * dtype.bytes // ranks, 2 * micro)
    for dtype, count in reduced.items():
        yield _collective("reduce_scatter", "data", ranks, dtype, count * dtype.bytes, micro)
