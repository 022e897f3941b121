"""What the observed weights of all ranks prove: who is in the optimizer, whether updates reach the forward pass, and whether states are as wide as promised."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpbridge.observe.audit.findings import Finding
from mpbridge.observe.audit.ranks import offenders
from mpbridge.observe.audit.weights import Weights


def weight_findings(ranks: Sequence[Weights], *, stepped: bool) -> list[Finding]:
    """Membership and equality; with `stepped`, motion and width too."""
    owned = sum(len(rank.trainable) for rank in ranks)
    wrong = [
        [f"{n}: requires_grad was switched off" for n in r.flipped]
        + [f"{n}: in no group" for n in r.outside]
        + [f"{n}: in several optimizers" for n in r.twice]
        for r in ranks
    ]
    findings = [
        Finding(
            subject="optimizer holds",
            promised="every trainable parameter",
            found="not each once" if any(wrong) else "every trainable parameter",
            ok=not any(wrong),
            count=owned,
            offenders=offenders(wrong),
            cure="put each into one group of one optimizer; it would never be updated, or twice a step"
            if any(wrong)
            else "",
        )
    ]
    for subject, promised, count, bad in (
        ("weights as read", "main weights, rounded", sum(r.compared for r in ranks), [r.unequal for r in ranks]),
        ("quantized weights as read", "main weights, quantized", sum(r.quantized for r in ranks), [r.misread for r in ranks]),
    ):  # fmt: skip
        if count:
            findings.append(
                Finding(
                    subject=subject,
                    promised=promised,
                    found="different" if any(bad) else promised,
                    ok=not any(bad),
                    count=count,
                    offenders=offenders(bad),
                    cure="main weights do not reach what the forward pass reads" if any(bad) else "",
                )
            )
    return findings + (_motion_findings(ranks) if stepped else [])


def _motion_findings(ranks: Sequence[Weights]) -> list[Finding]:
    return [_moved_finding(ranks), _bits_finding(ranks)]


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
    cure = "no gradient arrived" if any(unreached) else ""
    if any(stuck) or orphans:
        cure = "the optimizer's gradients or parameters are not the model's"
    return Finding(
        subject="weights moved",
        promised="all that have gradients",
        found=_how_many(ranks, names, moved_anywhere),
        ok=not any(wrong),
        count=len(names),
        offenders=offenders(wrong),
        cure=cure,
    )


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
    return ", ".join(notes)


def _bits_finding(ranks: Sequence[Weights]) -> Finding:
    wrong = [rank.coarse + [f"{name}, emptied after the update" for name in rank.emptied] for rank in ranks]
    narrow, emptied = any(rank.coarse for rank in ranks), any(rank.emptied for rank in ranks)
    found = (
        "values with 10 or fewer mantissa bits in FP32"
        if narrow
        else "nothing"
        if emptied
        else "as wide as their dtype"
    )
    cure = (
        "find what rounds them between updates"
        if narrow
        else "find what resets them: every update starts from empty moments"
    )
    return Finding(
        subject="bits of states",
        promised="as wide as their dtype",
        found=found,
        ok=not any(wrong),
        count=sum(len(rank.moved) for rank in ranks),
        offenders=offenders(wrong),
        cure=cure if any(wrong) else "",
    )
