"""Turns what all ranks observed into findings: pure functions with the same result on every rank; and what cannot be observed, and why.

A fact that is neither seen nor in the table of what leaves no evidence is a fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mpbridge.numerics.observation.modules import is_library, is_norm
from mpbridge.observe.audit.findings import Finding, judged, offenders
from mpbridge.observe.audit.gradients import data_parallel, is_alone
from mpbridge.observe.audit.observe import Observed, Tally, merged
from mpbridge.observe.audit.promise import ABSENT, Promises
from mpbridge.observe.audit.weights import Weights
from mpbridge.precision.wording import HIGH

ROLES = ("params", "main_params", "grads", "main_grads", "exp_avg", "exp_avg_sq", "factors", "buffers")

_CURES = {
    "exp_avg": "torch's Adam keeps moments in the parameter's dtype: store parameters in fp32, or use FusedAdam",
    "exp_avg_sq": "torch's Adam keeps moments in the parameter's dtype: store parameters in fp32, or use FusedAdam",
}


def tensor_findings(ranks: Sequence[Observed], promises: Promises, *, live: bool) -> list[Finding]:
    """One finding per role: promised and found storage, bytes over all ranks. live: an update was applied, so optimizer states must exist."""
    together = merged(list(ranks))
    findings = []
    for role in ROLES:
        tallies = {key[1:]: tally for key, tally in together.items() if key[0] == role}
        if tallies:
            by_rank = [
                [n for key, tally in rank.tensors.items() if key[0] == role for n in tally.offenders] for rank in ranks
            ]
            named = {key: tally for key, tally in tallies.items() if tally.unpromised}
            if len(named) < len(tallies):
                findings.append(_role(role, {key: tallies[key] for key in tallies if key not in named}, by_rank))
            if named:
                findings.append(_unpromised(named))
    if live:
        trained = {name for rank in ranks for name in rank.weights.trainable}
        apart = {name for name in trained if promises.of("main_params", name) != ABSENT}
        findings += _missing({key[0] for key in together}, promises, own=bool(trained) and not apart)
    return findings


def _role(role: str, tallies: dict[tuple[str, str], Tally], by_rank: list[list[str]]) -> Finding:
    promised = sorted({promise for promise, _ in tallies if promise})
    found = sorted({kind for _, kind in tallies})
    wrong = offenders(by_rank)
    cure = _CURES.get(role, "") if wrong else ""
    if wrong and (promised == [ABSENT] or any(kind.endswith(" twice") for kind in found)):
        cure = "an unused copy: switch FusedAdam's master_weights off"
    return Finding(
        subject=role,
        promised="/".join(promised) or "-",
        found="/".join(found),
        ok=not wrong,
        count=sum(tally.count for tally in tallies.values()),
        bytes=sum(tally.bytes for tally in tallies.values()),
        offenders=wrong,
        cure=cure,
    )


def _unpromised(tallies: dict[tuple[str, str], Tally]) -> Finding:
    """Buffers that no recipe decides: each is named with the dtype in which it lives, so that none is taken for kept in FP32."""
    found = (f"{kind}: {', '.join(sorted(tally.unpromised))}" for (_, kind), tally in sorted(tallies.items()))
    return Finding(
        subject="other buffers",
        promised="-",
        found="; ".join(found),
        ok=True,
        count=sum(tally.count for tally in tallies.values()),
        bytes=sum(tally.bytes for tally in tallies.values()),
    )


def _missing(roles: set[str], promises: Promises, *, own: bool) -> list[Finding]:
    """Roles that must exist after an update but do not. An optimizer without moments (SGD) has none to check. own: all that trains is its own main weight."""
    owner = "params" if own else promises.owner
    if owner != "params" and "main_params" not in roles:
        wide = promises.policy.main_params
        wanted = f"{wide.short if wide else 'fp32'}, held by the {owner}"
        cure = "updates are lost in the rounding of 16-bit parameters"
        return [Finding(subject="main_params", promised=wanted, found=ABSENT, ok=False, cure=cure)]
    if owner == "params" and "main_params" not in roles:
        return [Finding(subject="main_params", promised=ABSENT, found=ABSENT, ok=True)]
    return []


def rule_findings(ranks: Sequence[Observed], promises: Promises, *, ran: bool) -> list[Finding]:
    """Which linears are quantized by which rule. Native modules do not know their recipe before their first forward pass."""
    pairs: Counter[tuple[str, str]] = Counter()
    wrong: list[list[str]] = []
    for seen in ranks:
        bad: list[str] = []
        for (promised, found), paths in seen.rules.items():
            pairs[promised, found] += len(paths)
            if promised != found:
                bad += paths
        wrong.append(bad)
    if not pairs or (promises.policy.quantized and not ran and not promises.emulated):
        return []
    promised = _counts((promised, count) for (promised, _), count in pairs.items())
    found = _counts((found, count) for (_, found), count in pairs.items())
    cure = "these linears run in another precision than the recipe says"
    return [judged("linears", promised, wrong, seen=found, cure=cure, count=sum(pairs.values()))]


def _counts(items: Iterable[tuple[str, int]]) -> str:
    total: Counter[str] = Counter()
    for name, count in items:
        total[name] += count
    if set(total) == {HIGH}:
        return HIGH
    return ", ".join(f"{count} {name}" for name, count in sorted(total.items()))


def flag_finding(ranks: Sequence[Observed]) -> list[Finding]:
    """Compares the fields that the recipe decides, and flags derived from them, with the live objects."""
    looked = max(seen.flags[0] for seen in ranks)
    return [judged("derived flags", "as planned", [seen.flags[1] for seen in ranks], count=looked)] if looked else []


def weight_findings(ranks: Sequence[Weights], *, stepped: bool) -> list[Finding]:
    """Membership and equality; with `stepped`, motion and width too."""
    owned = sum(len(rank.trainable) for rank in ranks)
    wrong = [
        [f"{n}: requires_grad was switched off" for n in r.flipped]
        + [f"{n}: in no group" for n in r.outside]
        + [f"{n}: in several optimizers" for n in r.twice]
        + r.shared
        for r in ranks
    ]
    cure = "put each into one group of one optimizer; it would never be updated, or twice a step"
    findings = [
        judged("optimizer holds", "every trainable parameter", wrong, found="not each once", cure=cure, count=owned)
    ]
    for subject, promised, count, bad in (
        ("weights as read", "main weights, rounded", sum(r.compared for r in ranks), [r.unequal for r in ranks]),
        ("quantized weights as read", "main weights, quantized", sum(r.quantized for r in ranks), [r.misread for r in ranks]),
    ):  # fmt: skip
        if count:
            cure = "main weights do not reach what the forward pass reads"
            findings.append(judged(subject, promised, bad, cure=cure, count=count))
    if not stepped and any(rank.coded for rank in ranks):
        found = "values of 8-bit codes in FP32, before any update"
        cure = "make main weights from the values before quantization; only weights that were published in FP8 or FP4 begin like this"
        findings.append(
            judged("bits of main weights", "as wide as their dtype", [r.coded for r in ranks], found=found, cure=cure)
        )
    return findings + ([_moved_finding(ranks), _bits_finding(ranks)] if stepped else [])


def _moved_finding(ranks: Sequence[Weights]) -> Finding:
    names = {name for rank in ranks for name in rank.trainable}
    moved_anywhere = {name for rank in ranks for name in rank.moved}
    stuck = [
        [
            *rank.stuck,
            *rank.frozen_rate,
            *(f"{name}: update does not follow from its moments" for name in rank.otherwise),
            *(f"{name}: restored after the update" for name in rank.undone),
        ]
        for rank in ranks
    ]
    unreached = _unreached(ranks, moved_anywhere)
    # parameters that no optimizer claims to own
    orphans = names - _names(
        [*r.moved, *r.stuck, *r.small, *r.idle, *r.unreached, *r.outside, *r.frozen_rate, *r.unused, *r.undone, *r.zero]
        for r in ranks
    )
    wrong = [[*a, *b, *sorted(orphans)] for a, b in zip(stuck, unreached, strict=True)]
    foreign = any(stuck) or orphans
    cure = "the optimizer's gradients or parameters are not the model's" if foreign else "no gradient arrived"
    found = _how_many(ranks, names, moved_anywhere)
    return judged("weights moved", "all that have gradients", wrong, seen=found, cure=cure, count=len(names))


def _names(rows: Iterable[Iterable[str]]) -> set[str]:
    return {name for row in rows for name in row}


def _unreached(ranks: Sequence[Weights], moved_anywhere: set[str]) -> list[list[str]]:
    # a shard whose rows no token touched proves nothing: its parameter was reached on another rank
    reached = moved_anywhere | _names(rank.small for rank in ranks)
    return [[name for name in rank.unreached if name not in reached] for rank in ranks]


def _how_many(ranks: Sequence[Weights], names: set[str], moved_anywhere: set[str]) -> str:
    lost = _names(rank.small for rank in ranks) - moved_anywhere
    idle = _names(rank.idle for rank in ranks) - moved_anywhere
    notes = [f"{len(moved_anywhere & names)} of {len(names)}"]
    notes += [f"{len(idle)} in experts without tokens"] if idle else []
    unused = _names(rank.unused for rank in ranks) - moved_anywhere
    notes += [f"{len(unused)} in modules that did not run"] if unused else []
    zero = _names(rank.zero for rank in ranks) - moved_anywhere
    notes += [f"{len(zero)} with gradients of zero"] if zero else []
    notes += [f"{len(lost)} below rounding at this learning rate"] if lost else []
    for kind in sorted({kind for rank in ranks for kind in rank.updated}):
        below, updated = (sum(getattr(rank, name)[kind] for rank in ranks) for name in ("below", "updated"))
        notes += (
            [f"{below / updated:.0%} of the updates of {kind} weights below rounding"]
            if below >= 0.01 * updated > 0
            else []
        )
    return ", ".join(notes)


def _bits_finding(ranks: Sequence[Weights]) -> Finding:
    wrong = [rank.coarse + [f"{name}, emptied after the update" for name in rank.emptied] for rank in ranks]
    found, cure = "nothing", "find what resets them: every update starts from empty moments"
    if any(rank.coarse for rank in ranks):
        found, cure = "values with 10 or fewer mantissa bits in FP32", "find what rounds them between updates"
    count = sum(len(rank.moved) for rank in ranks)
    return judged("bits of states", "as wide as their dtype", wrong, found=found, cure=cure, count=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """One fact that leaves no evidence in some runs."""

    subject: str
    when: Callable[[Any, Promises], bool]
    why: str


def _library(engine: Any, promises: Promises) -> bool:
    """Whether Transformer Engine's modules compute: their GEMMs, norms and attention are calls into its own library."""
    return any(
        type(module).__module__.startswith("transformer_engine") for chunk in engine.model for module in chunk.modules()
    )


def _apex(engine: Any, promises: Promises) -> bool:
    """Whether megatron-core's norms are Apex's kernels."""
    return any(is_norm(module) and is_library(module) for chunk in engine.model for module in chunk.modules())


def _fused_accumulation(engine: Any, promises: Promises) -> bool:
    return bool(getattr(engine.configs.model, "gradient_accumulation_fusion", False))


def _beside_kernels(engine: Any, promises: Promises) -> bool:
    """Whether neither a linear's GEMM nor autograd shows what the optimizer should read."""
    return (_library(engine, promises) or _fused_accumulation(engine, promises)) and not is_alone(engine)


def _fused_loss(engine: Any, promises: Promises) -> bool:
    """Whether the cross entropy may be a fused kernel: the config says so, or leaves it open in a model with Transformer Engine's modules."""
    model = getattr(getattr(engine, "configs", None), "model", None)
    fused = getattr(model, "cross_entropy_loss_fusion", None)
    graphs = getattr(model, "cuda_graph_impl", None) not in (None, "none")
    return bool(fused) or ((fused is None or graphs) and _library(engine, promises))


def _copied(engine: Any, promises: Promises) -> bool:
    """Whether gradients are copied into one buffer before they are sent, so that addresses do not identify them."""
    sharded = hasattr(engine.optimizer, "shards") or engine.run.facts.traits.layout != "buffers"
    return sharded and len(data_parallel(engine)) > 1


def _summed(engine: Any, promises: Promises) -> bool:
    return bool(getattr(engine.configs.model, "calculate_per_token_loss", False))


def _uncounted(engine: Any, promises: Promises) -> bool:
    """Whether a foreign loop sums losses over tokens, whose count may not be visible."""
    return promises.foreign and _summed(engine, promises)


def _context(engine: Any, promises: Promises) -> bool:
    return bool(engine.run.facts.parallel.context > 1)


FACTOR = "factor of gradients"
MATRICES = "gradients of matrices"
_TE = "Transformer Engine computes it in its own library, bypassing torch's dispatcher; the inputs, outputs and state of its modules are checked"

UNSEEN = (
    Unseen(subject="compute", when=_library, why=_TE),
    Unseen(subject="attention", when=_library, why=_TE),
    Unseen(subject="softmax", when=_library, why=_TE),
    Unseen(subject="norms", when=_library, why=_TE),
    Unseen(subject="norms", when=_apex, why="Apex's norm is one kernel"),
    Unseen(subject="quantized GEMMs", when=_library, why=_TE),
    Unseen(
        subject="gradients",
        when=_beside_kernels,
        why="kernels of linears bypass torch's dispatcher, and other ranks add to what autograd delivers",
    ),
    Unseen(subject="loss", when=_fused_loss, why="a fused cross entropy is one kernel"),
    Unseen(
        subject="wire: which gradients",
        when=_copied,
        why="they are copied into one buffer before they are sent: the number of elements is checked, and gradients of linear weights by value",
    ),
    Unseen(
        subject=FACTOR,
        when=_context,
        why="under context parallelism the schedule scales each chunk's loss: values are checked up to a common factor",
    ),
    Unseen(
        subject=FACTOR,
        when=_uncounted,
        why="calculate_per_token_loss is set and no token count was seen: values are checked up to a common factor",
    ),
    Unseen(
        subject="loss scale",
        when=_summed,
        why="calculate_per_token_loss is set: backward starts at sums over tokens, the report has means over micro-batches",
    ),
    Unseen(
        subject=MATRICES,
        when=_fused_accumulation,
        why="gradient_accumulation_fusion adds weight gradients to their buffer inside one kernel",
    ),
)


def why_unseen(engine: Any, promises: Promises, subject: str) -> str:
    """The reason; '' if the fact can be observed."""
    return next((row.why for row in UNSEEN if row.subject == subject and row.when(engine, promises)), "")
