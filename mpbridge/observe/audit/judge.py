"""Turns what all ranks observed into findings: pure functions with the same result on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from mpbridge.observe.audit.findings import Finding
from mpbridge.observe.audit.observe import Observed, Tally, merged
from mpbridge.observe.audit.promise import ABSENT, Promises
from mpbridge.observe.audit.ranks import offenders
from mpbridge.precision.wording import HIGH

ROLES = ("params", "main_params", "grads", "main_grads", "exp_avg", "exp_avg_sq", "buffers")

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
            findings.append(_role(role, tallies, by_rank))
    if live:
        findings += _missing({key[0] for key in together}, promises)
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


def _missing(roles: set[str], promises: Promises) -> list[Finding]:
    """Roles that must exist after an update but do not. An optimizer without moments (SGD) has none to check."""
    owner = promises.owner
    if owner != "params" and "main_params" not in roles:
        wanted = (
            promises.policy.main_params.short if promises.policy.main_params else "fp32"
        ) + f", held by the {owner}"
        return [
            Finding(
                subject="main_params",
                promised=wanted,
                found=ABSENT,
                ok=False,
                cure="updates are lost in the rounding of 16-bit parameters",
            )
        ]
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
    names = offenders(wrong)
    finding = Finding(
        subject="linears",
        promised=_counts((promised, count) for (promised, _), count in pairs.items()),
        found=_counts((found, count) for (_, found), count in pairs.items()),
        ok=not names,
        count=sum(pairs.values()),
        offenders=names,
        cure="these linears run in another precision than the recipe says" if names else "",
    )
    return [finding]


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
    wrong = offenders([seen.flags[1] for seen in ranks])
    if not looked:
        return []
    return [
        Finding(
            subject="derived flags",
            promised="as planned",
            found="different" if wrong else "as planned",
            ok=not wrong,
            count=looked,
            offenders=wrong,
        )
    ]
