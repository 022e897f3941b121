"""GPU memory other than states and activations: workspaces, communication and pipeline buffers, dispatch, CUDA graphs; and what torch does not count.

Checked against Megatron-LM's published test cases (live bytes minus states, H100, A100 and GB200; `scripts/evidence/check_memory_rows.py` prints the figures).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mpbridge.common.facts import RunFacts
from mpbridge.common.machines import Machine
from mpbridge.planning.memory.buckets import bucket_size
from mpbridge.planning.memory.lasting import gather_buffer, graph_inputs, placeholders, workspaces
from mpbridge.planning.memory.layers import parameters
from mpbridge.planning.memory.ranks import Coordinates
from mpbridge.precision.policy import PrecisionPolicy

Known = Literal["exact", "measured", "estimated"]

CONTEXT = 2**30
"""CUDA context, kernel code and NCCL's own buffers: what the driver allocates before torch does. An estimate, +-50 %."""
STAGE_TENSORS = 2
"""Tensors of a model chunk that follows a stage boundary: its input, which the block keeps until the next one, and that input's gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """One kind of memory that is neither a state nor an activation."""

    name: str
    bytes: int
    known: Known
    band: float
    """Relative error not exceeded in nine of ten comparisons; for an estimate, a judgement."""
    because: str


def beside(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> tuple[Beside, ...]:
    """Everything of that kind on a rank that torch counts; without a GPU only communication buffers."""
    return tuple(part for part in _parts(policy, run, at) if part.bytes)


def outside(policy: PrecisionPolicy, run: RunFacts, activations: int) -> tuple[Beside, ...]:
    """What torch does not count: the CUDA context, space that its allocator cannot use, buffers that a dispatcher allocates itself."""
    if run.machine is None or not run.machine.gpu:
        return ()
    found = (
        Beside(name="context", bytes=CONTEXT, known="estimated", band=0.5, because="CUDA context and NCCL"),
        Beside(
            name="fragmentation",
            bytes=int(0.02 * activations),
            known="estimated",
            band=1.0,
            because="2 % of activations: blocks that the allocator holds but cannot use",
        ),
        Beside(
            name="dispatch",
            bytes=_dispatch(policy, run),
            known="estimated",
            band=1.0,
            because="DeepEP's and HybridEP's own buffers: space for every rank's tokens, in both directions",
        ),
    )
    return tuple(part for part in found if part.bytes)


def _dispatch(policy: PrecisionPolicy, run: RunFacts) -> int:
    shape, parallel = run.shape, run.parallel
    if not shape.experts or parallel.expert == 1 or run.model.get("moe_token_dispatcher_type") != "flex":
        return 0
    tokens = shape.seq_length * run.micro_batch_size // parallel.context // parallel.tensor
    return 2 * tokens * parallel.expert * shape.hidden_size * policy.compute.bytes


def _parts(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> Iterator[Beside]:
    parallel, shape, machine = run.parallel, run.shape, run.machine
    rows = shape.seq_length * run.micro_batch_size // parallel.context
    whole = rows * shape.hidden_size * policy.compute.bytes
    share = whole // (parallel.tensor if parallel.sequence else 1)
    if machine is not None and machine.gpu:
        yield from _on_a_gpu(policy, run, at, machine)
    yield Beside(
        name="communication",
        bytes=_communication(policy, run, at),
        known="estimated",
        band=0.2,
        because="gathered layers and gradients in transit",
    )
    if run.model.get("tp_comm_overlap") and parallel.tensor > 1:
        yield Beside(
            name="overlap buffers",
            bytes=4 * whole,
            known="measured",
            band=0.3,
            because="one 15B case with tp_comm_overlap",
        )
    yield Beside(
        name="gather buffer",
        bytes=gather_buffer(policy, run, at),
        known="measured",
        band=0.1,
        because="megatron-core's global memory buffer, on Megatron-LM's test cases",
    )
    if parallel.pipeline > 1:
        yield Beside(
            name="pipeline buffers",
            bytes=STAGE_TENSORS * share * sum(not chunk.first for chunk in at.chunks(run)),
            known="measured",
            band=0.1,
            because="the input of each model chunk and its gradient, on Megatron-LM's test cases",
        )
    yield Beside(
        name="CUDA graphs",
        bytes=graph_inputs(policy, run, at),
        known="estimated",
        band=0.5,
        because="static inputs of the captured layers",
    )


def _on_a_gpu(policy: PrecisionPolicy, run: RunFacts, at: Coordinates, machine: Machine) -> Iterator[Beside]:
    """What the GPU's libraries keep, independent of communication."""
    yield Beside(
        name="workspaces",
        bytes=workspaces(run, machine),
        known="measured",
        band=0.2,
        because="cuBLAS workspaces of torch and Transformer Engine, on Megatron-LM's test cases",
    )
    yield Beside(
        name="gradient placeholders",
        bytes=placeholders(policy, run, at),
        known="measured",
        band=0.1,
        because="one tensor per weight shape under gradient_accumulation_fusion, on Megatron-LM's test cases",
    )


def _communication(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> int:
    """Gathered layers under full sharding, the receiving side of an all-to-all reduce-scatter."""
    full = "params" in run.traits.shards
    if not full and not run.ddp.get("reduce_scatter_with_fp32_accumulation"):
        return 0
    sizes: Counter[int | None] = Counter()
    for chunk in parameters(run, at):
        for parameter in chunk:
            sizes[parameter.layer] += parameter.weight.elements
    if full:
        # the unit being computed, the one being gathered next, and the gradients of one in transit
        largest = max(sizes.values(), default=0)
        return 2 * largest * (policy.gather or policy.params).bytes + largest * policy.reduce.bytes
    if run.optimizer.distributed:
        total = sum(sizes.values())
        return min(total, bucket_size(run) or total) * policy.reduce.bytes
    return 0
