"""The operations of one training step on one rank, as megatron-core issues them: matrix products, attention, memory traffic, collectives; and their
ideal seconds, by the constant that each is multiplied by.

Sizes are per rank. `simulate --step` records the real megatron-core's products and collectives and compares them with this list."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from mpbridge.common.errors import BadValue
from mpbridge.common.facts import RunFacts
from mpbridge.common.machines import Machine

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
    format: str = ""
    """Format of both products' operands: 'fp8' with fp8_dot_product_attention; empty: 16 bits."""
    bytes: float = 0.0
    """Bytes of scores written to and read from memory; 0 for fused kernels."""


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

    layers: int
    experts: int
    """Number of layers that are mixtures of experts."""
    gemms: tuple[MatrixProduct, ...]
    attention: tuple[AttentionWork, ...]
    traffic: Mapping[str, float]
    """Memory-bound operations ('norms', 'activation', 'scan', 'routing', 'quantization', 'weights', 'loss') -> bytes read and written."""
    collectives: tuple[Collective, ...]
    step: tuple[Collective, ...]
    optimizer: float
    """Bytes that the update reads and writes."""


HOST_MOE, HOST_DENSE = 1.0, 0.25
"""Host work per layer and micro-batch, in units of the constant 'host': kernel launches of a mixture of experts, and of a dense layer."""
HOST_LATENT, HOST_SHARED = 0.25, 0.1
"""Additional host work for latent attention's projections and for a shared expert."""
SATURATION = 64
"""A product [m, k] x [k, n] takes (1 + 64/m)(1 + 64/n)(1 + 64/k) times its ideal time: half the peak at 64 x large x large. Whole tiles and waves
of tiles were tried on the fitted rows and made predictions worse (kernels choose their own tiles, and split the last wave)."""


def gemm_seconds(gemm: MatrixProduct, machine: Machine, *, saturated: bool = True) -> tuple[str, float]:
    """(name of the constant, ideal seconds of all its executions). saturated: False prices even the smallest product at the peak. Raises BadValue for a machine without a rate for the format."""
    peak = machine.flops(gemm.format)
    if peak is None and gemm.format in ("fp32", "tf32"):
        peak = machine.flops("tf32") or machine.flops("fp32")
    if peak is None:
        raise BadValue(
            f"{machine.name} has no rate for {gemm.format} products in the table: use another recipe, or a --machine-file that has it"
        )
    grown = (1 + SATURATION / max(1, gemm.m)) * (1 + SATURATION / max(1, gemm.n)) * (1 + SATURATION / max(1, gemm.k))
    return f"gemm_{gemm.scaling or gemm.format}", (grown if saturated else 1.0) * gemm.flops / peak


def attention_seconds(part: AttentionWork, machine: Machine) -> float:
    """Both products at their format's peak, and the exponentials at 16 per clock and multiprocessor (32 on compute capability 10.3)."""
    wide = machine.flops("bf16") or machine.flops("fp16") or machine.flops("fp32") or 0.0
    peak = machine.flops(part.format) or wide
    found = part.flops / peak if peak else 0.0
    units = machine.multiprocessors * machine.clock * (32 if machine.arch == (10, 3) else 16)
    found += part.scores / units if units else 0.0
    return found + (part.bytes / machine.bandwidth if machine.bandwidth else 0.0)


def micro_seconds(run: RunFacts, work: Work, machine: Machine) -> Mapping[str, float]:
    """Constant -> ideal seconds per micro-batch on the device. 'grouped:gemm_x' is multiplied by both constants."""
    found: defaultdict[str, float] = defaultdict(float)
    for gemm in work.gemms:
        name, seconds = gemm_seconds(gemm, machine)
        found[f"grouped:{name}" if gemm.grouped else name] += seconds
    for part in work.attention:
        found["attention"] += attention_seconds(part, machine)
    bandwidth = machine.bandwidth or 1e11
    for kind, moved in work.traffic.items():
        found[f"memory:{kind}"] += moved / bandwidth
    return with_wires(found, run, work.collectives, machine)


def step_seconds(
    run: RunFacts, optimizer: float, collectives: Iterable[Collective], machine: Machine
) -> Mapping[str, float]:
    """Constant -> ideal seconds of what happens once per step. optimizer: bytes that the update reads and writes."""
    found = defaultdict(float, optimizer=optimizer / (machine.bandwidth or 1e11))
    return with_wires(found, run, collectives, machine)


def with_wires(
    found: defaultdict[str, float], run: RunFacts, collectives: Iterable[Collective], machine: Machine
) -> Mapping[str, float]:
    """With the ideal seconds of those collectives added."""
    for collective in collectives:
        for name, seconds in _wire(run, collective, machine):
            found[name] += seconds
    return found


def host_units(run: RunFacts, work: Work) -> float:
    """Host work per micro-batch in units of the constant 'host': what remains with CUDA graphs and dispatchers."""
    graphs = run.cuda_graphs
    if graphs.whole_step:
        return 0.0
    factor = (0.5 if graphs.inside_layers("attn") else 0.8) if graphs.on else 1.0
    flexible = run.dispatcher == "flex"
    routing = (1.0 if flexible else 1.3) * (1.4 if run.model.get("overlap_moe_expert_parallel_comm") else 1.0)
    beside = (HOST_LATENT, run.shape.latent_attention), (HOST_SHARED, run.shape.shared_expert_size)
    each = HOST_MOE + sum(units for units, has in beside if has)
    return factor * (each * routing * work.experts + HOST_DENSE * (work.layers - work.experts))


def _wire(run: RunFacts, one: Collective, machine: Machine) -> list[tuple[str, float]]:
    """(constant, ideal seconds) of a collective: the bytes that leave the rank, over the link that limits it."""
    size = float(one.bytes) * one.times
    share = (one.ranks - 1) / one.ranks
    moved = {
        "all_gather": size * (one.ranks - 1),
        "reduce_scatter": size * share,
        "all_reduce": 2 * size * share,
        "all_to_all": size * share,
    }.get(one.kind, size)
    if one.group == "tensor":
        name = "tensor_overlapped" if run.model.get("tp_comm_overlap") else "tensor"
        return [(name, moved / _link(machine, one.ranks))]
    if one.group == "expert":
        return _expert_wire(run, one, machine, moved)
    if one.group == "context":
        return [("context", moved / _link(machine, one.ranks * run.parallel.tensor))]
    if one.group == "pipeline":
        # an interleaved schedule sends while it computes; otherwise both sides wait
        name = "pipeline_overlapped" if (run.parallel.virtual_pipeline or 1) > 1 else "pipeline"
        return [(name, moved / 2 / _link(machine, run.parallel.world_size))]
    return [("data", moved / _link(machine, run.parallel.world_size))]


def _link(machine: Machine, reach: int) -> float:
    """Bytes per second and direction of the slowest link among `reach` neighbouring ranks; an unknown network is ignored, so priced as the inner link."""
    inner = machine.nvlink or 1e10
    return inner if reach <= machine.domain or not machine.network else machine.network


def _expert_wire(run: RunFacts, one: Collective, machine: Machine, moved: float) -> list[tuple[str, float]]:
    """All-to-all: flexible dispatchers send a token once to each rank (and node) that it goes to, the plain dispatcher once per expert."""
    topk = run.shape.expert_topk
    flexible = run.dispatcher == "flex"
    token = one.bytes * one.times / max(1, topk)
    over = "_overlapped" if run.model.get("overlap_moe_expert_parallel_comm") else ""
    inner = machine.nvlink or 1e10
    within = one.ranks <= machine.domain or not machine.network
    if one.kind != "all_to_all":
        return [(f"expert_{'link' if within else 'network'}{over}", moved / _link(machine, one.ranks))]
    if within:
        copies = one.ranks * (1 - (1 - 1 / one.ranks) ** topk) if flexible else topk
        return [(f"expert_link{over}", token * copies * (one.ranks - 1) / one.ranks / inner)]
    nodes = one.ranks / machine.domain
    copies = nodes * (1 - (1 - 1 / nodes) ** topk) if flexible else topk
    return [
        (f"expert_network{over}", token * copies * (nodes - 1) / nodes / machine.network),
        (f"expert_link{over}", token * topk / inner),
    ]
