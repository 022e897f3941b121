"""Turns what all ranks observed into findings: pure functions with the same result on every rank; and what cannot be observed, and why.

A fact that is neither seen nor in the table of what leaves no evidence is a fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpbridge.numerics.observation.modules import is_library, is_norm
from mpbridge.observe.audit.findings import Finding, judged, offenders
from mpbridge.observe.audit.gradients import data_parallel, is_alone
from mpbridge.observe.audit.observe import Observed, Tally, merged
from mpbridge.observe.audit.promise import ABSENT, Promises
from mpbridge.observe.audit.weights import Weights
from mpbridge.precision.wording import HIGH

ROLES = ("params", "main_params", "grads", "main_grads", "exp_avg", "exp_avg_sq", "factors", "buffers")

_MOMENTS = "torch's Adam keeps moments in the parameter's dtype: store parameters in fp32, or use FusedAdam"


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
                # buffers that no recipe decides: each is named with the dtype in which it lives, so that none is taken for kept in FP32
                kinds = (f"{kind}: {', '.join(sorted(tally.unpromised))}" for (_, kind), tally in sorted(named.items()))
                findings.append(judged("other buffers", "-", [], seen="; ".join(kinds), **_sizes(named)))
    if live and "main_params" not in {key[0] for key in together}:
        trained = {name for rank in ranks for name in rank.weights.trainable}
        apart = {name for name in trained if promises.of("main_params", name) != ABSENT}
        findings.append(_no_main_weights(promises, own=bool(trained) and not apart))
    return findings


def _role(role: str, tallies: dict[tuple[str, str], Tally], by_rank: list[list[str]]) -> Finding:
    promised = sorted({promise for promise, _ in tallies if promise})
    found = sorted({kind for _, kind in tallies})
    wrong = offenders(by_rank)
    cure = _MOMENTS if wrong and role in ("exp_avg", "exp_avg_sq") else ""
    if wrong and (promised == [ABSENT] or any(kind.endswith(" twice") for kind in found)):
        cure = "an unused copy: switch FusedAdam's master_weights off"
    return judged(role, "/".join(promised) or "-", by_rank, seen="/".join(found), cure=cure, **_sizes(tallies))


def _sizes(tallies: dict[tuple[str, str], Tally]) -> dict[str, Any]:
    return {name: sum(getattr(tally, name) for tally in tallies.values()) for name in ("count", "bytes")}


def _no_main_weights(promises: Promises, *, own: bool) -> Finding:
    """There are none, which is right where parameters are their own. own: all that trains is its own main weight."""
    if own or promises.owner == "params":
        return Finding(subject="main_params", promised=ABSENT, found=ABSENT, ok=True)
    wide = promises.policy.main_params
    wanted = f"{wide.short if wide else 'fp32'}, held by the {promises.owner}"
    cure = "updates are lost in the rounding of 16-bit parameters"
    return Finding(subject="main_params", promised=wanted, found=ABSENT, ok=False, cure=cure)


def rule_findings(ranks: Sequence[Observed], promises: Promises, *, ran: bool) -> list[Finding]:
    """Which linears are quantized by which rule. Native modules do not know their recipe before their first forward pass."""
    pairs: Counter[tuple[str, str]] = Counter()
    for seen in ranks:
        pairs.update({pair: len(paths) for pair, paths in seen.rules.items()})
    wrong = [[path for pair, paths in seen.rules.items() if pair[0] != pair[1] for path in paths] for seen in ranks]
    if not pairs or (promises.policy.quantized and not ran and not promises.emulated):
        return []
    promised = _counts((promised, count) for (promised, _), count in pairs.items())
    found = _counts((found, count) for (_, found), count in pairs.items())
    cure = "these linears run in another precision than the recipe says"
    return [judged("linears", promised, wrong, seen=found, cure=cure, count=sum(pairs.values()))]


def _counts(items: Iterable[tuple[str, int]]) -> str:
    total = sum((Counter({name: count}) for name, count in items), Counter[str]())
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
    kinds = {"flipped": "requires_grad was switched off", "outside": "in no group", "twice": "in several optimizers"}
    wrong = [[f"{n}: {what}" for kind, what in kinds.items() for n in getattr(r, kind)] + r.shared for r in ranks]
    cure = "put each into one group of one optimizer; it would never be updated, or twice a step"
    holds, meant = "optimizer holds", "every trainable parameter"
    findings = [judged(holds, meant, wrong, found="not each once", cure=cure, count=owned)]
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
        coded, wide = [r.coded for r in ranks], "as wide as their dtype"
        findings.append(judged("bits of main weights", wide, coded, found=found, cure=cure))
    return findings + ([_moved_finding(ranks), _bits_finding(ranks)] if stepped else [])


def _moved_finding(ranks: Sequence[Weights]) -> Finding:
    names = {name for rank in ranks for name in rank.trainable}
    moved_anywhere = {name for rank in ranks for name in rank.moved}
    kinds = {"otherwise": "update does not follow from its moments", "undone": "restored after the update"}
    altered = [[f"{name}: {what}" for kind, what in kinds.items() for name in getattr(r, kind)] for r in ranks]
    stuck = [[*rank.stuck, *rank.frozen_rate, *words] for rank, words in zip(ranks, altered, strict=True)]
    # a shard whose rows no token touched proves nothing: its parameter was reached on another rank
    reached = moved_anywhere | _names(rank.small for rank in ranks)
    unreached = [[name for name in rank.unreached if name not in reached] for rank in ranks]
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


def _how_many(ranks: Sequence[Weights], names: set[str], moved_anywhere: set[str]) -> str:
    notes = [f"{len(moved_anywhere & names)} of {len(names)}"]
    for kind, words in _STILL.items():
        still = _names(getattr(rank, kind) for rank in ranks) - moved_anywhere
        notes += [f"{len(still)} {words}"] if still else []
    for kind in sorted({kind for rank in ranks for kind in rank.updated}):
        below, updated = (sum(getattr(rank, name)[kind] for rank in ranks) for name in ("below", "updated"))
        if below >= 0.01 * updated > 0:
            notes.append(f"{below / updated:.0%} of the updates of {kind} weights below rounding")
    return ", ".join(notes)


_STILL = {
    "idle": "in experts without tokens",
    "unused": "in modules that did not run",
    "zero": "with gradients of zero",
    "small": "below rounding at this learning rate",
}
"""Field of Weights -> why parameters need not have moved."""


def _bits_finding(ranks: Sequence[Weights]) -> Finding:
    wrong = [rank.coarse + [f"{name}, emptied after the update" for name in rank.emptied] for rank in ranks]
    found, cure = "nothing", "find what resets them: every update starts from empty moments"
    if any(rank.coarse for rank in ranks):
        found, cure = "values with 10 or fewer mantissa bits in FP32", "find what rounds them between updates"
    count = sum(len(rank.moved) for rank in ranks)
    return judged("bits of states", "as wide as their dtype", wrong, found=found, cure=cure, count=count)


def _library(engine: Any) -> bool:
    """Whether Transformer Engine's modules compute: their GEMMs, norms and attention are calls into its own library."""
    homes = (type(module).__module__ for chunk in engine.model for module in chunk.modules())
    return any(home.startswith("transformer_engine") for home in homes)


def _routers_there(engine: Any) -> bool:
    from mpbridge.backend.megatron.inside_model import multiplies_routers

    return _library(engine) and multiplies_routers(engine.configs.model)


def _fused_accumulation(engine: Any) -> bool:
    return bool(getattr(engine.configs.model, "gradient_accumulation_fusion", False))


def _beside_kernels(engine: Any) -> bool:
    """Whether neither a linear's GEMM nor autograd shows what the optimizer should read."""
    return (_library(engine) or _fused_accumulation(engine)) and not is_alone(engine)


def _fused_loss(engine: Any) -> bool:
    """Whether the cross entropy may be a fused kernel: the config says so, or leaves it open in a model with Transformer Engine's modules."""
    model = getattr(getattr(engine, "configs", None), "model", None)
    fused = getattr(model, "cross_entropy_loss_fusion", None)
    graphs = getattr(model, "cuda_graph_impl", None) not in (None, "none")
    return bool(fused) or ((fused is None or graphs) and _library(engine))


def _copied(engine: Any) -> bool:
    """Whether gradients are copied into one buffer before they are sent, so that addresses do not identify them."""
    sharded = hasattr(engine.optimizer, "shards") or engine.run.facts.traits.layout != "buffers"
    return sharded and len(data_parallel(engine)) > 1


def _summed(engine: Any) -> bool:
    return bool(getattr(engine.configs.model, "calculate_per_token_loss", False))


FACTOR = "factor of gradients"
MATRICES = "gradients of matrices"
_TE = "Transformer Engine computes it in its own library, bypassing torch's dispatcher; the inputs, outputs and state of its modules are checked"

UNSEEN: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    *((subject, _library, _TE) for subject in ("compute", "attention", "softmax", "norms", "quantized GEMMs")),
    ("router", _routers_there, _TE),
    ("norms", lambda engine: any(is_norm(m) and is_library(m) for c in engine.model for m in c.modules()), "Apex's norm is one kernel"),
    ("gradients", _beside_kernels, "kernels of linears bypass torch's dispatcher, and other ranks add to what autograd delivers"),
    ("loss", _fused_loss, "a fused cross entropy is one kernel"),
    ("wire: which gradients", _copied, "they are copied into one buffer before they are sent: the number of elements is checked, and gradients of linear weights by value"),
    (FACTOR, lambda engine: engine.run.facts.parallel.context > 1, "under context parallelism the schedule scales each chunk's loss: values are checked up to a common factor"),
    (FACTOR, lambda engine: bool(getattr(engine, "foreign", False)) and _summed(engine), "calculate_per_token_loss is set and no token count was seen: values are checked up to a common factor"),
    ("loss scale", _summed, "calculate_per_token_loss is set: backward starts at sums over tokens, the report has means over micro-batches"),
    (MATRICES, _fused_accumulation, "gradient_accumulation_fusion adds weight gradients to their buffer inside one kernel"),
)  # fmt: skip
"""(fact, when it leaves no evidence in a run, why)."""


def why_unseen(engine: Any, subject: str) -> str:
    """The reason; '' if the fact can be observed."""
    return next((why for fact, when, why in UNSEEN if fact == subject and when(engine)), "")
