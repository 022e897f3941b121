"""GPU memory other than states and activations: workspaces, communication and pipeline buffers, dispatch, CUDA graphs; and what torch does not count.

Checked against Megatron-LM's published test cases (live bytes minus states, H100, A100 and GB200; `scripts/evidence/check_memory_rows.py` prints the figures).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Self

from mpbridge.common.facts import RunFacts
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

_CASES = "on Megatron-LM's test cases"
KINDS: Mapping[str, tuple[Known, float, str]] = {
    "workspaces": ("measured", 0.2, f"cuBLAS workspaces of torch and Transformer Engine, {_CASES}"),
    "gradient placeholders": ("measured", 0.1, f"one tensor per weight shape under gradient_accumulation_fusion, {_CASES}"),
    "communication": ("estimated", 0.2, "gathered layers and gradients in transit"),
    "overlap buffers": ("measured", 0.3, "one 15B case with tp_comm_overlap"),
    "gather buffer": ("measured", 0.1, f"megatron-core's global memory buffer, {_CASES}"),
    "pipeline buffers": ("measured", 0.1, f"the input of each model chunk and its gradient, {_CASES}"),
    "CUDA graphs": ("estimated", 0.5, "static inputs of the captured layers"),
    "context": ("estimated", 0.5, "CUDA context and NCCL"),
    "fragmentation": ("estimated", 1.0, "2 % of activations: blocks that the allocator holds but cannot use"),
    "dispatch": ("estimated", 1.0, "DeepEP's and HybridEP's own buffers: space for every rank's tokens, in both directions"),
}  # fmt: skip
"""Kind -> how its size is known, its band (`Beside.band`), and from what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """One kind of memory that is neither a state nor an activation."""

    name: str
    bytes: int
    known: Known
    band: float
    """Relative error not exceeded in nine of ten comparisons; for an estimate, a judgement."""
    because: str

    @classmethod
    def of(cls, name: str, size: int) -> Self:
        """That many bytes of a kind in `KINDS`."""
        known, band, because = KINDS[name]
        return cls(name=name, bytes=size, known=known, band=band, because=because)


def beside(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> tuple[Beside, ...]:
    """Everything of that kind on a rank that torch counts; without a GPU only communication buffers."""
    return tuple(Beside.of(name, size) for name, size in _sizes(policy, run, at) if size)


def outside(policy: PrecisionPolicy, run: RunFacts, activations: int) -> tuple[Beside, ...]:
    """What torch does not count: the CUDA context, space that its allocator cannot use, buffers that a dispatcher allocates itself."""
    if run.machine is None or not run.machine.gpu:
        return ()
    sizes = {"context": CONTEXT, "fragmentation": int(0.02 * activations), "dispatch": _dispatch(policy, run)}
    return tuple(Beside.of(name, size) for name, size in sizes.items() if size)


def _dispatch(policy: PrecisionPolicy, run: RunFacts) -> int:
    shape, parallel = run.shape, run.parallel
    if not shape.experts or parallel.expert == 1 or run.model.get("moe_token_dispatcher_type") != "flex":
        return 0
    return 2 * (run.tokens // parallel.tensor) * parallel.expert * shape.hidden_size * policy.compute.bytes


def _sizes(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> Iterator[tuple[str, int]]:
    parallel, shape, machine = run.parallel, run.shape, run.machine
    whole = run.tokens * shape.hidden_size * policy.compute.bytes
    share = whole // parallel.sequence_width
    if machine is not None and machine.gpu:
        yield "workspaces", workspaces(run, machine)
        yield "gradient placeholders", placeholders(policy, run, at)
    yield "communication", _communication(policy, run, at)
    if run.model.get("tp_comm_overlap") and parallel.tensor > 1:
        yield "overlap buffers", 4 * whole
    yield "gather buffer", gather_buffer(policy, run, at)
    if parallel.pipeline > 1:
        yield "pipeline buffers", STAGE_TENSORS * share * sum(not chunk.first for chunk in at.chunks(run))
    yield "CUDA graphs", graph_inputs(policy, run, at)


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
