"""Bytes on a GPU, by role: exact where megatron-core's layout is followed, an estimate where that is said. And what would make it fit."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mpbridge.facts import Parallel, RunFacts
from mpbridge.hardware.machines import Machine
from mpbridge.memory.activations import activations
from mpbridge.memory.buckets import bucket_size
from mpbridge.memory.layers import parameters, unsplit
from mpbridge.memory.ranks import Coordinates
from mpbridge.memory.roles import roles
from mpbridge.precision.policy import PrecisionPolicy

STATES = (
    "params", "grads", "main_params", "main_grads", "exp_avg", "exp_avg_sq", "weight_copies", "weight_transposes", "weight_scales", "buffers", "padding",
)  # fmt: skip
"""Roles in the order in which tables show them."""
RESERVED = 2 * 2**30
"""Kept free for the CUDA context, NCCL and cuBLAS workspaces: an assumption, not a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one rank holds, in bytes."""

    rank: int
    stage: int
    roles: Mapping[str, int]
    """Bytes by role, roles that are absent left out."""
    activations: int
    """Estimate."""
    communication: int
    """Estimate: buffers beside those of the gradients."""
    elements: int
    """Parameters on this rank before sharding."""
    exact: bool
    """Whether `roles` is exact."""

    @property
    def states(self) -> int:
        """All but activations and communication."""
        return sum(self.roles.values())

    @property
    def total(self) -> int:
        """States, communication and activations."""
        return self.states + self.communication + self.activations

    @property
    def bytes_per_parameter(self) -> float:
        """States per parameter on this rank."""
        return self.states / max(1, self.elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether it fits, and what would help."""

    ok: bool
    needed: int
    """Bytes, RESERVED included."""
    available: int
    ways: tuple[str, ...] = ()
    """Changes, each of which alone makes it fit, or else the ones that save most."""


def memory(policy: PrecisionPolicy, run: RunFacts, *, rank: int | None = None) -> Memory:
    """The bytes of one rank; rank None: of the pipeline stage that holds most. Raises BadValue when layers cannot be divided as asked."""
    if rank is not None:
        return _of(policy, run, rank)
    step = run.parallel.world_size // run.parallel.pipeline
    return max((_of(policy, run, stage * step) for stage in range(run.parallel.pipeline)), key=lambda one: one.total)


def fit(policy: PrecisionPolicy, run: RunFacts, machine: Machine) -> Fit:
    """Whether the fullest rank fits into that machine, with what would make it fit when not."""
    needed, available = memory(policy, run).total + RESERVED, machine.memory_bytes
    if needed <= available or not available:
        return Fit(ok=True, needed=needed, available=available)
    tried = []
    for words, other_policy, other_run in _alternatives(policy, run):
        total = memory(other_policy, other_run).total + RESERVED
        if total < needed:
            tried.append((total, words))
    enough = [f"{words} ({_gib(total)})" for total, words in sorted(tried) if total <= available]
    most = [f"{words} ({_gib(total)}, not enough alone)" for total, words in sorted(tried)[:3]]
    return Fit(ok=False, needed=needed, available=available, ways=tuple(enough or most))


def total_parameters(run: RunFacts) -> int:
    """Parameters of the whole model, each counted once."""
    alone = unsplit(run)
    return sum(p.weight.elements for chunk in parameters(alone, Coordinates.of(0, alone.parallel)) for p in chunk)


def duplicate_main(run: RunFacts, *, rank: int = 0) -> int:
    """Bytes of one more FP32 copy of a rank's share of the weights: what a FusedAdam that keeps main weights wastes where the engine has its own."""
    at = Coordinates.of(rank, run.parallel)
    ranks = run.parallel.data * run.parallel.context
    return 4 * sum(
        -(-p.weight.elements // (run.parallel.expert_data if p.weight.expert and run.parallel.expert > 1 else ranks))
        for chunk in parameters(run, at)
        for p in chunk
    )


def _of(policy: PrecisionPolicy, run: RunFacts, rank: int) -> Memory:
    at = Coordinates.of(rank, run.parallel)
    found: Counter[str] = Counter()
    for role in roles(policy, run, rank=rank):
        found[role.name] += role.bytes
    return Memory(
        rank=rank,
        stage=at.stage,
        roles=MappingProxyType({name: found[name] for name in STATES if found[name]}),
        activations=activations(policy, run, at),
        communication=_communication(policy, run, at),
        elements=sum(p.weight.elements for chunk in parameters(run, at) for p in chunk),
        exact=run.traits.exact_memory,
    )


def _communication(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> int:
    """Buffers beside the gradients': gathered layers under full sharding, the receiving side of an all-to-all reduce-scatter."""
    sizes: Counter[int | None] = Counter()
    for chunk in parameters(run, at):
        for parameter in chunk:
            sizes[parameter.layer] += parameter.weight.elements
    if "params" in run.traits.shards:
        # the unit that computes and the one that is gathered next, and the gradients of one on their way
        largest = max(sizes.values(), default=0)
        return 2 * largest * (policy.gather or policy.params).bytes + largest * policy.reduce.bytes
    if run.ddp.get("reduce_scatter_with_fp32_accumulation") and run.optimizer.distributed:
        whole = sum(sizes.values())
        return min(whole, bucket_size(run) or whole) * policy.reduce.bytes
    return 0


def _alternatives(policy: PrecisionPolicy, run: RunFacts) -> list[tuple[str, PrecisionPolicy, RunFacts]]:
    """(what to write, the policy, the run) of the usual ways to save memory that this run does not use yet and that its world allows."""
    from mpbridge.formats import DType

    found: list[tuple[str, PrecisionPolicy, RunFacts]] = []
    parallel, optimizer = run.parallel, run.optimizer
    if not optimizer.distributed and run.traits.distributed_optimizer == "optional" and parallel.data > 1:
        found.append(
            (
                "ddp.use_distributed_optimizer=true",
                policy,
                dataclasses.replace(run, optimizer=dataclasses.replace(optimizer, distributed=True)),
            )
        )
    # beside quantized GEMMs the precision-aware optimizer failed on several releases (rule precision-aware-with-fp8)
    if not policy.precision_aware and optimizer.distributed and policy.compute is DType.BF16 and not policy.quantized:
        lower = dataclasses.replace(
            policy, precision_aware=True, main_params=DType.FP32, exp_avg=DType.BF16, exp_avg_sq=DType.BF16
        )
        found.append(("use_precision_aware_optimizer with bf16 moments", lower, run))
    if run.model.get("recompute_granularity") != "full":
        settings = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        found.append(
            (
                "model.recompute_granularity=full recompute_method=uniform recompute_num_layers=1",
                policy,
                dataclasses.replace(run, model={**run.model, **settings}),
            )
        )
    if run.micro_batch_size > 1:
        found.append(("train.micro_batch_size=1", policy, dataclasses.replace(run, micro_batch_size=1)))
    for words, sizes in _layouts(run):
        # a placement of layers on stages holds for that many stages only
        changed = (
            dataclasses.replace(run, parallel=sizes) if sizes.pipeline == parallel.pipeline else unsplit(run, sizes)
        )
        found.append((words, policy, changed))
    return found


def _layouts(run: RunFacts) -> list[tuple[str, Parallel]]:
    """Larger tensor, pipeline or expert parallelism in the same world."""
    sizes, shape = run.parallel, run.shape
    found: list[tuple[str, Parallel]] = []
    tensor = sizes.tensor * 2
    if (
        sizes.data % 2 == 0
        and tensor <= 8
        and shape.num_attention_heads % tensor == 0
        and shape.vocab_size % tensor == 0
        and shape.ffn_hidden_size % tensor == 0
    ):
        found.append(
            (
                f"tensor_model_parallel_size={tensor} with sequence_parallel=true",
                dataclasses.replace(sizes, tensor=tensor, sequence=True),
            )
        )
    if sizes.data % 2 == 0 and shape.num_layers % (sizes.pipeline * 2) == 0:
        found.append(
            (
                f"pipeline_model_parallel_size={sizes.pipeline * 2}",
                dataclasses.replace(sizes, pipeline=sizes.pipeline * 2, virtual_pipeline=None),
            )
        )
    if shape.experts and shape.experts % (sizes.expert * 2) == 0 and sizes.expert_data % 2 == 0:
        found.append(
            (f"expert_model_parallel_size={sizes.expert * 2}", dataclasses.replace(sizes, expert=sizes.expert * 2))
        )
    return found


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
