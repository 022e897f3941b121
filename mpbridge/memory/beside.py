"""What a GPU holds beside states and activations: workspaces, communication and pipeline buffers, dispatch, CUDA graphs; and what torch does not count.

Sizes were read off Megatron-LM's published test cases (live bytes minus states, H100, A100 and GB200; `scripts/check_memory_rows.py` prints the figures).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mpbridge.facts import RunFacts
from mpbridge.hardware.machines import Machine
from mpbridge.memory.buckets import bucket_size
from mpbridge.memory.layers import parameters
from mpbridge.memory.ranks import Coordinates
from mpbridge.precision.policy import PrecisionPolicy

Known = Literal["exact", "measured", "estimated"]

CONTEXT = 2**30
"""CUDA context, kernels' code and NCCL's own buffers: what the driver takes before torch allocates anything. An estimate, +-50 %."""
CUBLAS_HOPPER, CUBLAS_BEFORE = 97 * 2**20, 69 * 2**20
"""Live bytes beyond states of cases without pipeline: cuBLAS workspaces (H100 and GB200 96 to 106 MiB, A100 68 to 78)."""
GROUPED = 128 * 2**20
"""Workspaces of grouped products' four streams, from compute capability 9.0 on (230 to 257 MiB against 97 to 118)."""
STAGE_TENSORS = 10
"""Activations of one stage boundary that stay allocated (eight to ten on Mixtral 8x22B, a 7B model and DeepSeek-V3's proxies)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """One kind of memory that is neither a state nor an activation."""

    name: str
    bytes: int
    known: Known
    band: float
    """Relative error that nine of ten comparisons keep; of an estimate, a judgement."""
    because: str


def beside(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> tuple[Beside, ...]:
    """Everything of that kind on a rank, as torch counts it; without a GPU only buffers of communication."""
    return tuple(part for part in _parts(policy, run, at) if part.bytes)


def outside(run: RunFacts, activations: int) -> tuple[Beside, ...]:
    """What torch does not count: the CUDA context, and room that its allocator cannot use."""
    if run.machine is None or not run.machine.gpu:
        return ()
    return (
        Beside(name="context", bytes=CONTEXT, known="estimated", band=0.5, because="CUDA context and NCCL"),
        Beside(
            name="fragmentation",
            bytes=int(0.02 * activations),
            known="estimated",
            band=1.0,
            because="2 % of activations: blocks that the allocator holds and cannot use",
        ),
    )


def _workspaces(run: RunFacts, machine: Machine) -> Beside:
    hopper = machine.arch is not None and machine.arch >= (9, 0)
    grouped = run.shape.grouped_gemm and run.model.get("transformer_impl") != "local"
    return Beside(
        name="workspaces",
        bytes=(CUBLAS_HOPPER if hopper else CUBLAS_BEFORE) + (GROUPED if grouped and hopper else 0),
        known="measured",
        band=0.3,
        because="cuBLAS, on Megatron-LM's test cases",
    )


def _parts(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> Iterator[Beside]:
    parallel, shape, machine = run.parallel, run.shape, run.machine
    rows = shape.seq_length * run.micro_batch_size // parallel.context
    whole = rows * shape.hidden_size * policy.compute.bytes
    share = whole // (parallel.tensor if parallel.sequence else 1)
    if machine is not None and machine.gpu:
        yield _workspaces(run, machine)
    size = _communication(policy, run, at)
    if size:
        yield Beside(
            name="communication",
            bytes=size,
            known="estimated",
            band=0.2,
            because="gathered layers and gradients on their way",
        )
    if run.model.get("tp_comm_overlap") and parallel.tensor > 1:
        yield Beside(
            name="overlap buffers",
            bytes=4 * whole,
            known="measured",
            band=0.3,
            because="one 15B case with tp_comm_overlap",
        )
    if parallel.pipeline > 1:
        yield Beside(
            name="pipeline buffers",
            bytes=STAGE_TENSORS * share,
            known="measured",
            band=0.3,
            because="eight to ten stage tensors stay allocated",
        )
    if shape.experts and run.model.get("moe_token_dispatcher_type") == "flex" and parallel.expert > 1:
        tokens = rows // parallel.tensor
        across = machine is not None and parallel.expert > machine.domain
        yield Beside(
            name="dispatch",
            bytes=(5 if across else 2) * tokens * parallel.expert * shape.hidden_size * policy.compute.bytes,
            known="measured",
            band=0.3,
            because="room for every rank's tokens, there and back, and again between hosts: two DeepSeek-V3 proxies",
        )
    graphs = _graphs(run, share, len([layer for chunk in at.chunks(run) for layer in chunk.layers]))
    if graphs:
        yield Beside(
            name="CUDA graphs",
            bytes=graphs,
            known="estimated",
            band=1.0,
            because="static inputs and outputs of the graphed modules",
        )


def _graphs(run: RunFacts, share: int, layers: int) -> int:
    if run.model.get("cuda_graph_impl") in (None, "none") and not run.model.get("enable_cuda_graph"):
        return 0
    return 4 * share * layers


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
        # the unit that computes and the one that is gathered next, and the gradients of one on their way
        largest = max(sizes.values(), default=0)
        return 2 * largest * (policy.gather or policy.params).bytes + largest * policy.reduce.bytes
    if run.optimizer.distributed:
        total = sum(sizes.values())
        return min(total, bucket_size(run) or total) * policy.reduce.bytes
    return 0
