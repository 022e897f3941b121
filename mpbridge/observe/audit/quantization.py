"""Judges quantized linears by the operands of their GEMMs: grid, format of the role, rotation, rounding, number of GEMMs, delayed scales."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mpbridge.numerics.observation.modules import linears
from mpbridge.observe.audit.findings import Finding, judged, not_observed
from mpbridge.observe.audit.library import library_faults, scale_faults
from mpbridge.observe.audit.operands import asked, backward_is_quantized
from mpbridge.observe.audit.products import has_trained_weight
from mpbridge.observe.audit.promise import Promises
from mpbridge.observe.audit.watch import Watch
from mpbridge.precision.regions import GEMMS, Gemms, Quant

_STRAYS = 0.05
"""Share of elements not at their nearest code above which rounding was stochastic; in practice it is 0 or about a quarter."""

_DRIFT = 8.0
"""Standard deviations of the sum of rounding errors that no unbiased rounding comes to."""


@dataclass
class Quantizations:
    """One rank's observation."""

    promised: int = 0
    """GEMMs that should have been quantized in this step."""
    seen: int = 0
    looked: int = 0
    """Number of elements that were judged of an operand, at most."""
    wrong: list[str] = field(default_factory=list)
    scales: int = 0
    stale: list[str] = field(default_factory=list)
    amaxes: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Tensor -> (newest entry of its history, absolute maximum that this rank saw in the last micro-batch)."""
    cached: int = 0
    """Number of weights that Transformer Engine quantizes once per step and keeps."""
    outdated: list[str] = field(default_factory=list)
    """Weights of which the step read an outdated copy."""


def quantizations(engine: Any, promises: Promises, watch: Watch) -> Quantizations:
    """Compares every linear that is promised to be quantized with what its GEMMs read."""
    seen = Quantizations(cached=watch.library.cached, outdated=watch.library.stale, stale=watch.library.moved)
    for path, module in linears(engine.model).items():
        gemms = promises.gemms(path)
        if not gemms.distinct:
            continue
        for quant in gemms.distinct:
            if quant.row.history:
                faults = list(library_faults(path, quant, module, watch.library.begun, watch.library.amax))
                seen.scales += len(faults)
                seen.stale += filter(None, faults)
        passes, calls = watch.passes[path], watch.calls[path]
        found = watch.products.quantized.get(path)
        trained = has_trained_weight(module)
        expected: dict[str, int] = {
            gemm: passes if gemm == "fprop" else calls
            for gemm in GEMMS
            if _reads_codes(gemms, gemm) and (trained or gemm != "wgrad")
        }
        seen.promised += sum(expected.values())
        if found is None:
            if passes:
                seen.wrong.append(f"{path}: no GEMM was seen")
            continue
        seen.seen += sum(found.gemms.values())
        seen.looked = max(seen.looked, found.looked)
        seen.wrong += [f"{path} {operand}: {what}" for operand, what in found.bad.items()]
        for gemm, wanted in expected.items():
            got = found.gemms[gemm]
            # the first trained layer needs no gradient of its input
            if got != wanted and not (gemm == "dgrad" and got == 0):
                seen.wrong.append(f"{path}: {got} of {wanted} {gemm} GEMMs")
        for quant in gemms.distinct:
            if quant.bits == 4 and found.strays is not None and asked(quant, "stochastic_rounding"):
                seen.wrong += _drawn(f"{path} dy", *found.strays)
            scaled = scale_faults(path, quant, module, found.amax, found.left) if quant.row.history else ()
            for where, newest, fault in scaled:
                seen.scales += 1
                seen.stale += [fault] if fault else []
                name = where.rpartition(" ")[2]
                if name in found.amax and not math.isnan(newest):
                    seen.amaxes[where] = (newest, found.amax[name])
    return seen


def _reads_codes(gemms: Gemms, gemm: str) -> bool:
    quant: Quant | None = getattr(gemms, gemm)
    if quant is None or gemm in quant.row.high:
        return False
    return gemm == "fprop" or backward_is_quantized(quant)


def _drawn(where: str, share: float, drift: float) -> list[str]:
    """What is wrong with stochastic rounding. share, drift: `operands.strays`."""
    if share < _STRAYS:
        return [f"{where}: rounded to nearest, promised stochastic rounding"]
    side = "away from" if drift > 0 else "towards"
    what = f"{side} zero on average, by {abs(drift):.0f} standard deviations"
    return [f"{where}: rounded {what}, promised stochastic rounding"] if abs(drift) > _DRIFT else []


def quantization_findings(ranks: Sequence[Quantizations], promises: Promises, *, why: str) -> list[Finding]:
    """Operands and counts; scales if they are delayed. why: the reason if GEMMs cannot be observed here, else ''."""
    if not promises.policy.quantized:
        return []
    promised, seen = sum(rank.promised for rank in ranks), sum(rank.seen for rank in ranks)
    text = " and ".join(f"{quant.format} {quant.scaling}" for quant in promises.policy.quants)
    if why:
        scales = _scale_findings(ranks, promises, wanted=promised > 0)
        return [not_observed("quantized GEMMs", text, why), *scales, *_cached_findings(ranks)]
    wrong, looked = [rank.wrong for rank in ranks], max(rank.looked for rank in ranks)
    found = f"{seen} per step, {looked:,} elements of an operand" + (", some not as promised" if any(wrong) else "")
    cure = "operands differ from the recipe"
    made = judged("quantized GEMMs", f"{promised} a step, {text}", wrong, seen=found, cure=cure, count=seen)
    if promised > 0 and seen == 0:
        made = dataclasses.replace(made, ok=False, cure=cure)
    return [made, *_scale_findings(ranks, promises)]


def _scale_findings(ranks: Sequence[Quantizations], promises: Promises, *, wanted: bool = False) -> list[Finding]:
    """wanted: delayed linears ran, so their scales must have been seen."""
    if not any(quant.row.history for quant in promises.policy.quants):
        return []
    count = sum(rank.scales for rank in ranks)
    stale = [[*rank.stale, *_unseen(rank, ranks)] for rank in ranks]
    made = judged("delayed scales", "follow their amax history", stale, found="do not", count=count)
    return [dataclasses.replace(made, found="nothing was seen", ok=False) if made.ok and wanted and not count else made]


def _cached_findings(ranks: Sequence[Quantizations]) -> list[Finding]:
    count = sum(rank.cached for rank in ranks)
    cure = (
        "copies from an earlier step were read: call set_is_first_microbatch() on the model in each step's first micro-batch, and "
        "post_all_gather_processing() after a gather of FP8 weights"
    )
    outdated = [rank.outdated for rank in ranks]
    how: dict[str, Any] = {"found": "outdated copies", "cure": cure, "count": count}
    return [judged("quantized copies as read", "weights, quantized", outdated, **how)] if count else []


def _unseen(rank: Quantizations, ranks: Sequence[Quantizations]) -> list[str]:
    faults = []
    for where, (newest, _) in rank.amaxes.items():
        # the maximum over the ranks that reduce their amaxes together; a history cannot exceed the maximum over all ranks
        seen = [other.amaxes[where][1] for other in ranks if where in other.amaxes]
        own = rank.amaxes[where][1]
        if own and not (own * (1 - 1e-6) <= newest <= max(seen) * (1 + 1e-6)):
            faults.append(f"{where}: newest amax in the history is {newest:.6g}, the tensor's is {own:.6g}")
    return faults
