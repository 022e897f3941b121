"""What digests compare: the policy before anything is built, replicas and shards of all ranks, and frozen parameters, of which no bit changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mpbridge.backend.devices.collectives import from_all, world_size
from mpbridge.common.errors import AuditFailed
from mpbridge.numerics.observation.modules import is_rotary, module_paths
from mpbridge.numerics.observation.tensors import digest, local
from mpbridge.observe.audit.findings import Finding, judged
from mpbridge.observe.audit.holdings import answer, holdings
from mpbridge.observe.audit.promise import Promises
from mpbridge.planning.memory.keeps import FROZEN
from mpbridge.precision.policy import PrecisionPolicy


def agree(policy: PrecisionPolicy, *, group: Any = None) -> str:
    """The fingerprint shared by every rank of `group` (None: the world).

    Raises AuditFailed on all ranks, naming those whose policy differs from the majority's (rank 0's on a tie) and the fields that differ.
    """
    mine = policy.fingerprint()
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return mine
    prints = from_all(mine, group=group)
    if len(set(prints)) == 1:
        return mine
    # full policies are exchanged only when ranks differ
    data = from_all(policy.as_data(), group=group)
    votes = Counter(prints)
    most = max(votes.values())
    usual = next(one for one in prints if votes[one] == most)
    model = data[prints.index(usual)]
    lines = []
    for rank, one in enumerate(prints):
        if one != usual:
            own = data[rank]
            fields = (
                f"{name}: {own[name]!r} instead of {model[name]!r}" for name in model if own.get(name) != model[name]
            )
            lines.append(f"  - rank {rank} ({one[:12]}): {', '.join(fields)}")
    head = f"ranks disagree on the precision policy (the majority has {usual[:12]}):"
    raise AuditFailed("\n".join([head, *lines, "give every rank the same recipe and overrides"]))


Key = tuple[str, int, int]
"""(global name, tensor-parallel slice, experts)."""


@dataclass
class Copies:
    """One rank's whole parameters and shards."""

    whole: dict[Key, int] = field(default_factory=dict)
    """Digest of each parameter that this rank holds whole, or gathers; of its main weights and moments where it has all of them; of rotary frequencies."""
    shards: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Parameter -> (elements here, elements in all)."""


def copies(engine: Any, read: Mapping[str, int] | None = None) -> Copies:
    """Digests of this rank's replicas; read: what the forward pass read of every parameter, if shards are gathered."""
    own = answer(engine, "audit_copies")
    if own is not None:
        found: Copies = own(read)
        return found
    if world_size() == 1:
        return Copies()
    seen, slices = Copies(), _slices()
    # what other ranks own follows an update in the next forward pass only: what the last one read is compared
    behind = read is not None and bool(getattr(engine, "shards_behind", False))
    for name, parameter in engine.named_parameters():
        key = _key(name, parameter, slices)
        sharded = hasattr(parameter, "_local_tensor")
        if sharded:
            seen.shards[name] = (int(local(parameter).numel()), int(parameter.numel()))
        if not sharded and not behind:
            seen.whole[key] = digest(parameter)
        elif read is not None and name in read:
            seen.whole[key] = read[name]
    seen.whole |= _states(engine, slices) | _draws(engine)
    for module, path in module_paths(engine.model).items():
        if is_rotary(module) and isinstance(getattr(module, "inv_freq", None), torch.Tensor):
            seen.whole[f"{path}.inv_freq", 0, 0] = digest(module.inv_freq)
    return seen


def states_before(engine: Any) -> dict[Key, int]:
    """Digests of main weights and moments before an update, as `copies` has them after it; none on a single rank."""
    if world_size() == 1 or answer(engine, "audit_copies") is not None:
        return {}
    states = _states(engine, _slices())
    return {(f"{name}, before the update", one, two): found for (name, one, two), found in states.items()}


def _states(engine: Any, slices: tuple[int, int, int]) -> dict[Key, int]:
    """Digests of main weights and moments of every parameter that this rank updates as a whole; ranks of one tensor-parallel slice have the same."""
    found: dict[Key, int] = {}
    for held in holdings(engine):
        if held.updated is None or hasattr(held.parameter, "_local_tensor"):
            continue
        if local(held.updated).numel() != held.parameter.numel():
            continue  # a shard
        _, expert_tensor, expert = _key(held.name, held.parameter, slices)
        place = (expert_tensor, expert) if expert else (slices[0], 0)
        tensors = {"main weights": held.main} | {role: held.state.get(role) for role in ("exp_avg", "exp_avg_sq")}
        for role, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and type(local(tensor)) in (torch.Tensor, torch.nn.Parameter):
                found[f"{held.name} ({role})", *place] = digest(local(tensor).detach())
    return found


def _draws(engine: Any) -> dict[Key, int]:
    """What an emulation's random bytes and delayed scales follow from: seed and step, the same on every rank, as Transformer Engine's are under megatron-core's
    seeds; amax histories, the same over the ranks that reduce them."""
    emulation: Any = getattr(engine, "emulation", None)
    found, group = getattr(emulation, "randomness", None), getattr(emulation, "group", None)
    drawn = {} if found is None else {("seed and step of stochastic rounding", 0, 0): hash((found.seed, found.step))}
    if group is None or dist.get_world_size(group) == 1:
        return drawn
    # delayed scaling's histories are maxima over these ranks
    first = dist.get_process_group_ranks(group)[0]
    pairs = ((one.forward_table, one.backward_table) for one in emulation.quantizers.values())
    tables = [table for pair in pairs for table in pair if table is not None]
    return drawn | {(f"amax histories {i}", first, 0): digest(table.history) for i, table in enumerate(tables)}


def _slices() -> tuple[int, int, int]:
    """This rank's position among tensor-parallel, expert-parallel and expert-tensor-parallel ranks."""
    from megatron.core import parallel_state as state

    if not state.model_parallel_is_initialized():
        return 0, 0, 0
    tensor, expert = state.get_tensor_model_parallel_rank(), state.get_expert_model_parallel_rank()
    return tensor, expert, state.get_expert_tensor_parallel_rank()


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
        cure = "ranks are training different models"
        findings.append(judged("replicas", "equal on every rank", [wrong], cure=cure, count=len(shared)))
    sizes: dict[str, tuple[int, int]] = {}
    for seen in ranks:
        for name, (here, all_of_it) in seen.shards.items():
            sizes[name] = (sizes.get(name, (0, 0))[0] + here, all_of_it)
    if sizes:
        wrong = [f"{name}: {have} of {want} elements" for name, (have, want) in sizes.items() if have != want]
        found = "missing or duplicate elements"
        findings.append(judged("shards", "every element once", [wrong], found=found, count=len(sizes)))
    return findings


def _sides(prints: Mapping[int, Sequence[int]]) -> str:
    """'rank 1 differs', or the groups of ranks that agree."""
    groups = sorted(prints.values(), key=len, reverse=True)
    if len(groups[0]) > len(groups[1]):
        odd = [str(rank) for group in groups[1:] for rank in group]
        return f"rank{'s' if len(odd) > 1 else ''} {', '.join(odd)} differ{'' if len(odd) > 1 else 's'}"
    return " against ".join("rank " + ", ".join(map(str, group)) for group in groups)


@dataclass
class Fixed:
    """One rank's observation."""

    promised: int = 0
    wrong: list[str] = field(default_factory=list)


def digests(engine: Any) -> dict[str, int]:
    """Parameter that needs no gradient -> digest of its bits as stored: of a quantized weight its codes and scales, and those by columns apart, since a library may make them later."""
    found = {}
    for name, parameter in engine.named_parameters():
        if not parameter.requires_grad:
            held = local(parameter.detach())
            found[name] = _digest(_stored(held, _ROWS) or [held])
            if columns := _stored(held, _COLUMNS):
                found[f"{name} by columns"] = _digest(columns)
    return found


_ROWS = ("_data", "_rowwise_data", "_scale_inv", "_rowwise_scale_inv", "_amax_rowwise")
_COLUMNS = ("_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise")
"""NVFP4's amaxes are the second factor of its scales."""


def _stored(held: Any, names: Sequence[str]) -> list[torch.Tensor]:
    return [one for name in names if isinstance(one := getattr(held, name, None), torch.Tensor)]


def _digest(parts: Sequence[torch.Tensor]) -> int:
    return hash(tuple(digest(one.reshape(-1)) for one in parts))


def fixed(engine: Any, promises: Promises, first: Mapping[str, int]) -> Fixed:
    """What this rank sees. first: `digests` when the run was first observed; empty: unknown.

    Of a recipe without `frozen`, a script may freeze what it likes; no bit of that may change either.
    """
    seen, declared = Fixed(), bool(promises.policy.frozen)
    for name, parameter in engine.named_parameters():
        wanted = promises.trained(name) == FROZEN
        seen.promised += wanted
        if wanted is parameter.requires_grad and declared:
            seen.wrong.append(f"{name} ({'trains' if wanted else 'frozen, though the recipe trains it'})")
        elif wanted and getattr(parameter, "main_grad", None) is not None:
            seen.wrong.append(f"{name} (has a gradient)")
    now = digests(engine) if first else {}
    seen.wrong += [f"{name} (changed)" for name in now.keys() & first.keys() if now[name] != first[name]]
    return seen


def fixed_finding(ranks: Sequence[Fixed]) -> list[Finding]:
    """A row if anything is, or should be, frozen."""
    count, wrong = sum(rank.promised for rank in ranks), [rank.wrong for rank in ranks]
    if not count and not any(wrong):
        return []
    cure = "find what sets requires_grad, or writes into the parameters"
    return [judged("frozen", "as the recipe says, unchanged", wrong, found="otherwise", cure=cure, count=count)]
