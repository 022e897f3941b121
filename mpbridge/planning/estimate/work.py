"""The operations of one training step on one rank, as megatron-core issues them: matrix products, attention, memory traffic, collectives.

Sizes are per rank. `simulate --step` records the real megatron-core's products and collectives and compares them with this list.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Pass = Literal["forward", "dgrad", "wgrad", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProduct:
    """A matrix product [m, k] x [k, n]."""

    where: str
    """Module below its layer ('mlp.linear_fc1'), 'output_layer', 'mlp.router' or 'mtp.eh_proj'."""
    m: int
    n: int
    k: int
    format: str
    """'fp32', 'tf32', 'bf16', 'fp16', 'fp8' or 'fp4'."""
    scaling: str = ""
    """Scaling of its quantized operands: 'tensorwise', 'mxfp8' ...; empty: none."""
    step: Pass
    times: int = 1
    """Executions per micro-batch."""
    grouped: bool = False
    """Whether it is one of the experts' products."""

    @property
    def flops(self) -> float:
        """Floating-point operations of all `times` executions."""
        return 2.0 * self.m * self.n * self.k * self.times

    @property
    def key(self) -> tuple[int, int, int]:
        """The shape regardless of which operand comes first."""
        return (min(self.m, self.n), max(self.m, self.n), self.k)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWork:
    """Softmax(QK)V of some layers in one micro-batch, forward and backward."""

    flops: float
    """FLOPs of both products, forward and backward (3.5 times the forward ones), without masked positions."""
    scores: float
    """Number of exponentials, in forward and again in backward."""
    kernel: str = "fused"
    """'fused', 'unfused' or 'local'."""
    format: str = ""
    """Format of both products' operands: 'fp8' with fp8_dot_product_attention; empty: 16 bits."""
    bytes: float = 0.0
    """Bytes of scores written to and read from memory; 0 for fused kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTraffic:
    """Bytes read and written by memory-bound operations, per micro-batch."""

    kind: str
    """'norms', 'activation', 'routing', 'quantization', 'weights' or 'loss'."""
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One kind of communication. bytes: this rank's input (all-gather: its shard; reduce-scatter and all-to-all: its whole input)."""

    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "receive"]
    group: str
    """'tensor', 'data', 'expert_data', 'expert', 'pipeline', 'context', 'embedding' or 'world'."""
    ranks: int
    dtype: str
    bytes: int
    times: int = 1
    """Executions per micro-batch, or per step for those in `Work.step`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one rank: `micro` once per micro-batch, `step` once per step."""

    stage: int
    layers: int
    experts: int
    """Number of layers that are mixtures of experts."""
    gemms: tuple[MatrixProduct, ...]
    attention: tuple[AttentionWork, ...]
    traffic: tuple[MemoryTraffic, ...]
    collectives: tuple[Collective, ...]
    step: tuple[Collective, ...]
    optimizer: float
    """Bytes that the update reads and writes."""
    offloaded: float = 0.0
    """Bytes over the host link and back per micro-batch."""
    left_out: tuple[str, ...] = field(default=())
    """What is not priced, with the sign of the error."""


def flops(gemms: Iterable[MatrixProduct]) -> float:
    """Sum over all products."""
    return sum(gemm.flops for gemm in gemms)
