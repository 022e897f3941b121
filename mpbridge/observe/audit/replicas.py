"""Checks that replicas are equal and sharded copies complete, by comparing digests between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from mpbridge.observe.audit.findings import Finding
from mpbridge.observe.audit.stored import local
from mpbridge.observe.audit.subject import answer
from mpbridge.observe.audit.values import digest

Key = tuple[str, int, int]
"""(global name, tensor-parallel slice, experts)."""


@dataclass
class Copies:
    """One rank's whole parameters and shards."""

    whole: dict[Key, int] = field(default_factory=dict)
    """Digest of each parameter that this rank holds whole, or gathers."""
    shards: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Parameter -> (elements here, elements in all)."""


def copies(engine: Any, read: Mapping[str, int] | None = None) -> Copies:
    """Digests of this rank's replicas; read: what the forward pass read of every parameter, if shards are gathered."""
    own = answer(engine, "audit_copies")
    if own is not None:
        found: Copies = own(read)
        return found
    seen, slices = Copies(), _slices()
    for name, parameter in engine.named_parameters():
        key = _key(name, parameter, slices)
        if hasattr(parameter, "_local_tensor"):
            seen.shards[name] = (int(local(parameter).numel()), int(parameter.numel()))
            if read is not None and name in read:
                seen.whole[key] = read[name]
        else:
            seen.whole[key] = digest(parameter)
    return seen


def _slices() -> tuple[int, int, int]:
    """This rank's position among tensor-parallel, expert-parallel and expert-tensor-parallel ranks."""
    if not dist.is_initialized():
        return 0, 0, 0
    from megatron.core import parallel_state as state

    if not state.model_parallel_is_initialized():
        return 0, 0, 0
    return (
        state.get_tensor_model_parallel_rank(),
        state.get_expert_model_parallel_rank(),
        state.get_expert_tensor_parallel_rank(),
    )


def _key(name: str, parameter: Any, slices: tuple[int, int, int]) -> Key:
    tensor, expert, expert_tensor = slices
    split = bool(getattr(parameter, "tensor_model_parallel", False))
    if getattr(parameter, "shared_embedding", False):
        name = "embedding shared by the first and the last stage"
    if not getattr(parameter, "allreduce", True):
        return name, expert_tensor, expert + 1
    return name, tensor if split else 0, 0


def replica_findings(ranks: Sequence[Copies]) -> list[Finding]:
    """One finding for replicas and one for shards, as far as this layout has them."""
    if len(ranks) == 1:
        return []
    findings = []
    holders: dict[Key, dict[int, list[int]]] = {}
    for rank, seen in enumerate(ranks):
        for key, print_ in seen.whole.items():
            holders.setdefault(key, {}).setdefault(print_, []).append(rank)
    shared = {key: prints for key, prints in holders.items() if sum(map(len, prints.values())) > 1}
    if shared:
        wrong = [f"{key[0]} ({_sides(prints)})" for key, prints in shared.items() if len(prints) > 1]
        findings.append(
            Finding(
                subject="replicas",
                promised="equal on every rank",
                found="different" if wrong else "equal on every rank",
                ok=not wrong,
                count=len(shared),
                offenders=tuple(wrong),
                cure="ranks are training different models" if wrong else "",
            )
        )
    sizes: dict[str, tuple[int, int]] = {}
    for seen in ranks:
        for name, (here, all_of_it) in seen.shards.items():
            sizes[name] = (sizes.get(name, (0, 0))[0] + here, all_of_it)
    if sizes:
        wrong = [f"{name}: {have} of {want} elements" for name, (have, want) in sizes.items() if have != want]
        findings.append(
            Finding(
                subject="shards",
                promised="every element once",
                found="missing or duplicate elements" if wrong else "every element once",
                ok=not wrong,
                count=len(sizes),
                offenders=tuple(wrong),
            )
        )
    return findings


def _sides(prints: Mapping[int, Sequence[int]]) -> str:
    """'rank 1 differs', or the groups of ranks that agree."""
    groups = sorted(prints.values(), key=len, reverse=True)
    if len(groups[0]) > len(groups[1]):
        odd = [str(rank) for group in groups[1:] for rank in group]
        return f"rank{'s' if len(odd) > 1 else ''} {', '.join(odd)} differ{'' if len(odd) > 1 else 's'}"
    return " against ".join("rank " + ", ".join(map(str, group)) for group in groups)
