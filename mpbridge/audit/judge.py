"""From what all ranks observed to findings: pure, and the same on every rank."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Sequence

from mpbridge.audit.findings import Finding
from mpbridge.audit.observe import Observed, Tally
from mpbridge.audit.promise import ABSENT, Promises
from mpbridge.precision.words import HIGH

ROLES = ("params", "main_params", "grads", "main_grads", "exp_avg", "exp_avg_sq", "buffers")
EXPERTS = "*.experts.*"

_CURES = {
    "exp_avg": "torch's Adam keeps moments in the parameter's dtype: store parameters in fp32, or use FusedAdam",
    "exp_avg_sq": "torch's Adam keeps moments in the parameter's dtype: store parameters in fp32, or use FusedAdam",
}


def tensor_findings(ranks: Sequence[Observed], promises: Promises, *, live: bool) -> list[Finding]:
    """One finding per role: promised and found storage, bytes over all ranks."""
    merged: dict[tuple[str, str, str], Tally] = {}
    for seen in ranks:
        for key, tally in seen.tensors.items():
            into = merged.setdefault(key, Tally())
            into.count, into.elements, into.bytes = (
                into.count + tally.count,
                into.elements + tally.elements,
                into.bytes + tally.bytes,
            )
            into.offenders = list(dict.fromkeys([*into.offenders, *tally.offenders]))
    findings = [
        _role(role, {key[1:]: tally for key, tally in merged.items() if key[0] == role})
        for role in ROLES
        if any(k[0] == role for k in merged)
    ]
    if live:
        findings += _missing({key[0] for key in merged}, promises)
    return findings


def _role(role: str, tallies: dict[tuple[str, str], Tally]) -> Finding:
    promised = sorted({promise for promise, _ in tallies if promise})
    found = sorted({kind for _, kind in tallies})
    offenders = tuple(dict.fromkeys(name for tally in tallies.values() for name in tally.offenders))
    cure = _CURES.get(role, "") if offenders else ""
    if offenders and (promised == [ABSENT] or any(kind.endswith(" twice") for kind in found)):
        cure = "an unused copy: switch FusedAdam's master_weights off"
    return Finding(
        subject=role,
        promised="/".join(promised) or "-",
        found="/".join(found),
        ok=not offenders,
        count=sum(tally.count for tally in tallies.values()),
        bytes=sum(tally.bytes for tally in tallies.values()),
        offenders=offenders,
        cure=cure,
    )


def _missing(roles: set[str], promises: Promises) -> list[Finding]:
    """Roles that must exist after an update and don't. For an optimizer without moments (SGD) none are expected."""
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
    """Which linears are quantized by which rule. Before a forward, native modules do not know their recipe yet."""
    pairs: Counter[tuple[str, str]] = Counter()
    wrong: list[str] = []
    for seen in ranks:
        for (promised, found), paths in seen.rules.items():
            pairs[promised, found] += len(paths)
            if promised != found:
                wrong += [path for path in paths if path not in wrong]
    if not pairs or (promises.policy.quantized and not ran and not promises.emulated):
        return []
    finding = Finding(
        subject="linears",
        promised=_counts((promised, count) for (promised, _), count in pairs.items()),
        found=_counts((found, count) for (_, found), count in pairs.items()),
        ok=not wrong,
        count=sum(pairs.values()),
        offenders=tuple(wrong),
        cure="these linears run in another precision than the recipe says" if wrong else "",
    )
    return [finding]


def _counts(items: Iterable[tuple[str, int]]) -> str:
    total: Counter[str] = Counter()
    for name, count in items:
        total[name] += count
    if set(total) == {HIGH}:
        return HIGH
    return ", ".join(f"{count} {name}" for name, count in sorted(total.items()))


def step_findings(ranks: Sequence[Observed], promises: Promises) -> list[Finding]:
    """What linears returned, the autocast state and the dtypes on the wire."""
    findings = []
    outputs: dict[tuple[str, str], list[str]] = {}
    for seen in ranks:
        for key, paths in seen.outputs.items():
            outputs.setdefault(key, []).extend(paths)
    if outputs:
        wrong = tuple(
            dict.fromkeys(path for (wanted, found), paths in outputs.items() if wanted != found for path in paths)
        )
        findings.append(
            Finding(
                subject="compute",
                promised="/".join(sorted({wanted for wanted, _ in outputs})),
                found="/".join(sorted({found for _, found in outputs})),
                ok=not wrong,
                count=sum(len(paths) for paths in outputs.values()),
                offenders=wrong,
            )
        )
    autocast = sorted({state for seen in ranks for state in seen.autocast})
    if autocast:
        promised = "off" if promises.policy.autocast is None else promises.policy.autocast.value
        findings.append(
            Finding(subject="autocast", promised=promised, found="/".join(autocast), ok=autocast == [promised])
        )
    return findings + _wire(ranks, promises)


def _wire(ranks: Sequence[Observed], promises: Promises) -> list[Finding]:
    findings = []
    gather = promises.policy.gather or promises.policy.params
    stored = promises.policy.stored and not promises.emulated
    for kind, promised in (
        ("gradients", {promises.policy.reduce.short}),
        ("parameters", {gather.short} | ({"uint8"} if stored else set())),
    ):
        if kind == "parameters" and promises.policy.keep_fp32:
            promised |= {"fp32"}
        if kind == "gradients" and promises.policy.keep_fp32:
            promised |= {"fp32"}
        seen: Counter[str] = Counter()
        for rank in ranks:
            for (what, dtype), count in rank.wire.items():
                if what == kind:
                    seen[dtype] += count
        # a router's statistics share the data-parallel group; gradients of another dtype also show in their own role
        small = sum(seen.values()) / 1000
        seen = Counter({dtype: count for dtype, count in seen.items() if count > small})
        if seen:
            wrong = tuple(f"{count} elements in {dtype}" for dtype, count in seen.items() if dtype not in promised)
            findings.append(
                Finding(
                    subject=f"wire: {kind}",
                    promised="/".join(sorted(promised)),
                    found="/".join(sorted(seen)),
                    ok=not wrong,
                    count=sum(seen.values()),
                    offenders=wrong,
                )
            )
    return findings


def flag_finding(ranks: Sequence[Observed]) -> list[Finding]:
    """Fields that the recipe wrote, and flags derived from them, against the live objects."""
    looked = max(seen.flags[0] for seen in ranks)
    wrong = tuple(dict.fromkeys(fault for seen in ranks for fault in seen.flags[1]))
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


def motion_findings(ranks: Sequence[Observed], grad_norm: float | None, finite: bool) -> list[Finding]:
    """Whether every trainable parameter moved, counting a parameter as moved when any rank saw its part move."""
    names = list(dict.fromkeys(name for seen in ranks for name in seen.trainable))
    moved = {name for seen in ranks for name, yes in seen.moved.items() if yes}
    got = {name for seen in ranks for name, yes in seen.reached.items() if yes}
    judged = {name for seen in ranks for name, yes in seen.expected.items() if yes}
    # without moments (SGD) it is not known whether a gradient arrived
    known = any(seen.reached for seen in ranks)
    idle = {name for name in names if known and name not in got and fnmatch.fnmatchcase(name, EXPERTS)}
    unreached = [name for name in names if known and name not in got and name not in idle and name not in moved]
    stuck = [
        name for name in names if name in judged and name not in moved and name not in idle and name not in unreached
    ]
    notes = [f"{len(moved & set(names))} of {len(names)}"]
    notes += [f"{len(idle)} of experts without tokens"] if idle else []
    lost = [
        name for name in names if name not in moved and name not in idle and name not in stuck and name not in unreached
    ]
    notes += [f"{len(lost)} below rounding at this learning rate"] if lost else []
    cure = (
        "the optimizer reads other gradients, or holds other parameters, than the model"
        if stuck
        else "no gradient arrived"
        if unreached
        else ""
    )
    finding = Finding(
        subject="weights moved",
        promised="all that have gradients",
        found=", ".join(notes),
        ok=not stuck and not unreached,
        count=len(names),
        offenders=(*stuck, *unreached),
        cure=cure,
    )
    if grad_norm is None:
        return [finding]
    found = f"{grad_norm:.4g}"
    return [
        finding,
        Finding(subject="gradient norm", promised="finite and above 0", found=found, ok=finite and grad_norm > 0.0),
    ]
