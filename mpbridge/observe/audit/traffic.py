"""The wire: checks that every gradient element was reduced once, in the promised dtype, over the right ranks; the same for gathers and sends."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpbridge.common.facts import RunFacts
from mpbridge.common.formats import DType
from mpbridge.numerics.observation.operations import Sent
from mpbridge.observe.audit.findings import Finding, joined, judged, nothing, offenders
from mpbridge.observe.audit.gradients import data_parallel
from mpbridge.observe.audit.holdings import answer
from mpbridge.observe.audit.promise import Promises
from mpbridge.observe.audit.watch import Watch
from mpbridge.planning.memory.keeps import wires


@dataclass
class Traffic:
    """One rank's observation."""

    reduced: Counter[str] = field(default_factory=Counter)
    """dtype -> elements of gradients."""
    gathered: Counter[str] = field(default_factory=Counter)
    passed: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """Gradients that were not reduced exactly once."""
    gather_faults: list[str] = field(default_factory=list)
    ranks: int = 1
    """Size of the data-parallel group."""
    stages: int = 1
    to_pass: int | None = None
    """Elements of activations and their gradients that this stage sends on; None: unknown."""
    promised: dict[str, set[str]] = field(default_factory=dict)
    parallel: dict[str, Counter[str]] = field(default_factory=dict)
    """'tensor', 'context' or 'experts' -> dtype -> elements that this rank sent over those ranks; only kinds of more than one rank."""


def traffic(engine: Any, promises: Promises, watch: Watch, microbatches: int) -> Traffic:
    """What this rank sent in the step, by kind."""
    own = answer(engine, "audit_traffic")
    if own is not None:
        found: Traffic = own(_promised(promises), watch, microbatches)
        return found
    group = data_parallel(engine)
    seen = Traffic(ranks=len(group), stages=engine.run.facts.parallel.pipeline, promised=_promised(promises))
    for one in watch.sent:
        if one.role == "passed" and one.floating:
            seen.passed[one.dtype] += one.elements
    if seen.stages > 1:
        seen.to_pass = _to_pass(engine.run.facts, microbatches)
    seen.parallel = _within_model(engine, watch, set(group))
    if hasattr(engine.optimizer, "shards"):
        _sharded(engine, watch, group, seen, microbatches)
    else:
        buffers_into(engine.model, {id(parameter): name for name, parameter in engine.named_parameters()}, watch, seen)
    return seen


def _within_model(engine: Any, watch: Watch, averaged: set[int]) -> dict[str, Counter[str]]:
    """What was sent over tensor-, context- and expert-parallel ranks. averaged: the ranks that reduce gradients; where they are the experts' too, only what is
    exchanged between all of them (tokens) can be told from gradients."""
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    parallel, found = engine.run.facts.parallel, {}
    for kind, size, group_of in (
        ("tensor", parallel.tensor, state.get_tensor_model_parallel_group),
        ("context", parallel.context, state.get_context_parallel_group),
        ("experts", parallel.expert, state.get_expert_model_parallel_group),
    ):
        if size > 1 and state.model_parallel_is_initialized():
            ranks = set(dist.get_process_group_ranks(group_of()))
            found[kind] = Counter[str]()
            for one in watch.sent:
                if one.floating and set(one.group) == ranks and (ranks != averaged or one.kind == "all_to_all"):
                    found[kind][one.dtype] += one.elements
    return found


def _to_pass(facts: RunFacts, microbatches: int) -> int | None:
    """Elements that this pipeline stage sends in a step: every chunk sends activations to the next stage, and their gradients to the previous one."""
    from megatron.core import parallel_state as state

    shape, parallel = facts.shape, facts.parallel
    if not shape.hidden_size or not state.model_parallel_is_initialized() or facts.model.get("variable_seq_lengths"):
        return None
    stage: int = state.get_pipeline_model_parallel_rank()
    chunks = 2 * (parallel.virtual_pipeline or 1)
    # the model's first chunk sends no gradient, its last one no activation
    handed: int = chunks - (stage == 0) - (stage == parallel.pipeline - 1)
    length = shape.seq_length // parallel.context // (parallel.tensor if parallel.sequence else 1)
    return handed * microbatches * length * facts.micro_batch_size * shape.hidden_size


def _promised(promises: Promises) -> dict[str, set[str]]:
    policy = promises.policy
    ways = [wires(policy), *([wires(policy, kept=True)] if policy.keep_fp32 else [])]
    ways += [wires(policy, at_rest=DType.UINT8)] if policy.stored and not promises.emulated else []
    return {kind: {way[kind].short for way in ways} for kind in ways[0]}


# --- megatron-core's buffers: every element has an address --------------------------------------------------------------------------------
def buffers_into(chunks: Sequence[Any], names: Mapping[int, str], watch: Watch, seen: Traffic) -> None:
    """Adds what megatron-core's wrapped model chunks sent of their buffers. names: of parameters by their ids."""
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    if not dist.is_initialized() or not hasattr(chunks[0], "bucket_groups"):
        return
    whole = tuple(dist.get_process_group_ranks(state.get_data_parallel_group(with_context_parallel=True)))
    experts = tuple(dist.get_process_group_ranks(state.get_expert_data_parallel_group()))
    for chunk in chunks:
        for buffers, group in ((chunk.buffers, whole), (chunk.expert_parallel_buffers, experts)):
            for buffer in buffers:
                _buffer(buffer, names, group, watch.sent, seen)


def _buffer(buffer: Any, names: Mapping[int, str], group: tuple[int, ...], sent: Iterable[Sent], seen: Traffic) -> None:
    address = buffer.grad_data.untyped_storage().data_ptr()
    here = [one for one in sent if one.role == "reduced" and one.storage == address]
    within = [one for one in here if set(one.group) <= set(group)]
    for one in within:
        seen.reduced[one.dtype] += one.elements
    size, base = buffer.grad_data.element_size(), buffer.grad_data.storage_offset()
    instances = int(getattr(buffer.ddp_config, "num_distributed_optimizer_instances", 1) or 1)
    expected = len(group) // instances
    if len(group) > 1:
        for parameter, (start, end, *_) in buffer.param_index_map.items():
            times = _covered(within, (base + start) * size, (base + end) * size, expected)
            if times != 1:
                seen.faults.append(f"{names[id(parameter)]}: reduced {times} times over its {expected} ranks")
    if buffer.param_data is not None:
        weights = buffer.param_data.untyped_storage().data_ptr()
        for one in sent:
            if one.role == "gathered" and one.storage == weights:
                seen.gathered[one.dtype] += one.elements


def _covered(sent: Sequence[Sent], begin: int, end: int, ranks: int) -> float | int:
    """How often bytes begin:end were reduced over that many ranks; a fraction where only some of them were."""
    total = sum(max(0, min(one.end, end) - max(one.begin, begin)) for one in sent if len(one.group) == ranks)
    times = total / (end - begin)
    return int(times) if times == int(times) else round(times, 3)


# --- sharded engines copy gradients into one buffer before sending: elements are counted ---------------------------------------------------
def _sharded(engine: Any, watch: Watch, group: tuple[int, ...], seen: Traffic, microbatches: int) -> None:
    named = engine.optimizer.names.values()
    unsynced = getattr(engine.configs.model, "no_sync_func", None) is not None
    # Megatron-FSDP (a wrapper that owns main weights) reduces after each micro-batch, or once at the end; `gradients` verifies by value that the result is right
    either = engine.run.facts.traits.main_weights == "wrapper"
    times = {1, microbatches} if either else {1 if unsynced else microbatches}
    trained = [p for p in named if p.requires_grad]
    sizes, whole = [int(p.numel()) for p in trained], sum(int(p.numel()) for p in named)
    smallest = min((int(p.numel()) for p in named), default=0)
    padding = _padding(trained, len(group))
    elements_into(seen, watch, group, sizes, times=times, gathered=whole, padding=padding, smallest=smallest)


def elements_into(
    seen: Traffic,
    watch: Watch,
    group: tuple[int, ...],
    sizes: Sequence[int],
    *,
    times: Iterable[int],
    gathered: int = 0,
    padding: float = 0.5,
    smallest: int | None = None,
    these: bool = False,
) -> None:
    """Adds the messages of a wrapper that copies gradients into one buffer first, so that only elements can be counted.

    sizes: elements of each trained parameter; times: how often each may be reduced in the step; gathered: parameter elements that each pass needs;
    padding: the largest share added by padding; smallest: a smaller message is a norm, a loss or a flag (None: the smallest parameter);
    these: count only messages within exactly these ranks, else those within any group of that size.
    """
    least = min(sizes, default=0) if smallest is None else smallest
    for one in watch.sent:
        over = set(one.group) == set(group) if these else len(one.group) == len(group)
        if not over or one.elements * max(1, len(group)) < least:
            continue
        if one.role == "reduced" and one.floating:
            seen.reduced[one.dtype] += one.elements
        elif one.role == "gathered" and (one.floating or one.dtype == "uint8"):
            seen.gathered[one.dtype] += one.elements
    if len(group) == 1:
        return
    needed, sent = sum(sizes), sum(seen.reduced.values())
    if needed and not any(0.999 * n <= sent / needed <= (1.0 + padding) * n * 1.02 for n in times):
        seen.faults.append(f"{sent} gradient elements were reduced, expected {needed * min(times)}")
    came = sum(seen.gathered.values()) * len(group)
    if came < 0.999 * gathered:
        seen.gather_faults.append(f"{came} parameter elements were gathered, each pass needs {gathered}")


def _padding(parameters: Sequence[Any], ranks: int) -> float:
    """The largest share added by rows that pad every rank's part of a parameter to the same length."""
    whole = sum(int(p.numel()) for p in parameters)
    filled = sum(-(-p.shape[0] // ranks) * ranks * (int(p.numel()) // max(1, p.shape[0])) for p in parameters)
    # each unit is padded too; megatron-core aligns buckets to cache lines
    return (filled - whole) / whole + 0.5 if whole else 0.0


# --- findings ------------------------------------------------------------------------------------------------------------------------------
def traffic_findings(ranks: Sequence[Traffic], promises: Promises) -> list[Finding]:
    """Gradients, parameters and activations between stages."""
    findings = []
    for kind, role in (("gradients", "reduced"), ("parameters", "gathered")):
        promised = set().union(*(rank.promised[kind] for rank in ranks))
        faults = [rank.faults if kind == "gradients" else rank.gather_faults for rank in ranks]
        found = [_kept(getattr(rank, role)) for rank in ranks]
        odd = [_others(own, promised) + bad for own, bad in zip(found, faults, strict=True)]
        if any(found) or any(faults):
            findings.append(_judged(kind, "/".join(sorted(promised)), found, odd))
        elif kind == "gradients" and max(rank.ranks for rank in ranks) > 1:
            findings.append(nothing(f"wire: {kind}", "/".join(sorted(promised)), "gradients are not reduced"))
    if max(rank.stages for rank in ranks) > 1:
        findings.append(_between_stages(ranks, promises))
    # activations and their gradients are sent in the compute dtype; norms' gradients, the loss and routing in FP32
    either = {promises.policy.compute.short, "fp32"}
    for kind in sorted({kind for rank in ranks for kind, sent in rank.parallel.items() if sent}):
        over = [rank.parallel.get(kind, Counter()) for rank in ranks]
        findings.append(_judged(kind, " or ".join(sorted(either)), over, [_others(own, either) for own in over]))
    return findings


def _others(sent: Mapping[str, int], promised: Collection[str]) -> list[str]:
    return [f"{count} elements in {dtype}" for dtype, count in sent.items() if dtype not in promised]


def _judged(kind: str, promised: str, sent: Sequence[Mapping[str, int]], wrong: Sequence[list[str]]) -> Finding:
    """What every rank sent of one kind."""
    found, count = joined(dtype for own in sent for dtype in own), sum(sum(own.values()) for own in sent)
    return judged(f"wire: {kind}", promised, wrong, seen=found, count=count)


def _kept(seen: Counter[str]) -> dict[str, int]:
    # a router's statistics use the data-parallel group too; gradients of another dtype also show in their own role
    small = sum(seen.values()) / 1000
    return {dtype: count for dtype, count in seen.items() if count > small}


def _between_stages(ranks: Sequence[Traffic], promises: Promises) -> Finding:
    promised = promises.policy.pipeline.short
    wrong = [_others(rank.passed, {promised}) for rank in ranks]
    for own, rank in zip(wrong, ranks, strict=True):
        sent = sum(rank.passed.values())
        if rank.to_pass is not None and sent != rank.to_pass:
            own.append(f"{sent} elements were sent on, expected {rank.to_pass}")
    if not any(rank.passed for rank in ranks):
        found = nothing("wire: stages", promised, "no activation was sent between stages")
        return dataclasses.replace(found, found="nothing", offenders=offenders(wrong))
    return _judged("stages", promised, [rank.passed for rank in ranks], wrong)
