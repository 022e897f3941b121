"""Advice on recipes for a run on a machine: legality, peak speed of the GEMMs, memory, evidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from mpbridge.common.errors import MpbridgeError
from mpbridge.common.facts import RunFacts
from mpbridge.common.formats import DType
from mpbridge.planning.outlook import Outlook
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.recipe import Recipe

FITS = ("", "fits", "tight", "does not fit")
"""What `Advice.fit` can be, in the order in which advice is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One recipe on one run."""

    recipe: str
    status: str
    legal: bool
    reason: str
    bytes: int | None = None
    """Memory of the fullest GPU, with activations (an estimate)."""
    relative: float | None = None
    """Ratio of `bytes` to bf16_mixed's."""
    fit: str = ""
    """"fits", "tight" or "does not fit" (memory.by_role.verdict); empty for a recipe that is not valid here."""
    peak: float | None = None
    """Ratio of its GEMMs' dense peak to BF16's: a limit from the vendor's table, not a measured speed."""
    seconds: float | None = None
    """Time per step: predicted, or measured if `speed_known` says so; None: no prediction is possible."""
    band: float = 0.0
    """Relative error of a prediction."""
    one_sided: bool = False
    """Whether the prediction is a lower bound: the real step can only take longer."""
    speed_known: str = ""
    """"predicted", or the folder of the run in which it was measured."""
    hours: float | None = None
    """GPU hours per billion tokens."""
    error: float | None = None
    """Predicted relative error of one step's gradient (numerics.certificates); None: not asked for."""
    tied: bool = False
    """Whether its predicted step is within the error band of the fastest one's."""
    tie: int = 0
    """Which recipes tie: those of one number do, those with the fastest steps have the lowest; 0: it ties with none."""
    taste: int = 0

    @property
    def mark(self) -> str:
        """'=' for recipes of the first tie, '==' of the second and so on; '': none."""
        return "=" * self.tie

    @property
    def fits(self) -> bool:
        """False only if even the low end of the error band exceeds the memory."""
        return self.fit != "does not fit"

    @property
    def rank(self) -> tuple[object, ...]:
        """Sort key: legal, fitting before tight, below 32 bits, validated, faster than 16 bits by the vendor's table, then finer scales and less memory."""
        support = self.recipe == "fp32", self.status != "validated", (self.peak or 0.0) <= 1.0
        return (not self.legal, FITS.index(self.fit), *support, self.taste, self.bytes or 0, self.recipe)


ORDERS = ("status", "time", "memory", "error")
"""What `recommend --by` sorts legal and fitting recipes by; "status": `Advice.rank`."""


def order(advice: Advice, by: str) -> tuple[object, ...]:
    """Sort key: legal first, fitting before tight, then the requested criterion, then `rank`."""
    time = float("inf") if advice.seconds is None else advice.seconds
    asked = {"time": time, "memory": advice.bytes or 0, "error": advice.error or 0.0}.get(by, 0.0)
    return (not advice.legal, FITS.index(advice.fit), asked, *advice.rank)


def with_ties(made: Sequence[Advice]) -> list[Advice]:
    """The advice with `tie` set for recipes whose predicted steps the error band does not tell apart: the fastest with those within its band, then the fastest of the
    rest with those within its own, and so on."""
    able = [one for one in made if one.legal and one.fits and one.speed_known == "predicted"]
    rest = sorted(((one.seconds, one) for one in able if one.seconds is not None), key=lambda pair: pair[0])
    found: dict[str, tuple[int, bool]] = {}
    first, number = True, 0
    while rest:
        alike = [one.recipe for seconds, one in rest if seconds <= rest[0][0] * (1 + rest[0][1].band)]
        rest = rest[len(alike) :]
        if len(alike) > 1:
            number += 1
            found |= dict.fromkeys(alike, (number, first))
        first = False
    ties = (found.get(one.recipe, (0, False)) for one in made)
    return [dataclasses.replace(one, tie=tie, tied=fastest) for one, (tie, fastest) in zip(made, ties, strict=True)]


def decides(made: Sequence[Advice]) -> list[str]:
    """What tells the recipes of each tie apart: support, memory and numerics."""
    numbers = sorted({one.tie for one in made} - {0})
    return [_decides([one for one in made if one.tie == number]) for number in numbers]


def _decides(tied: Sequence[Advice]) -> str:
    least = min(one.bytes or 0 for one in tied)
    finest = min((one.error or 0.0, (one.peak or 1.0) > 1.0, one.taste) for one in tied)
    groups = {
        "support: trained to a known loss": [one for one in tied if one.status == "validated"],
        "memory: least": [one for one in tied if (one.bytes or 0) <= 1.01 * least],
        "numerics: finest": [one for one in tied if (one.error or 0.0, (one.peak or 1.0) > 1.0, one.taste) == finest],
    }
    words = [
        f"{what}: {', '.join(one.recipe for one in held[:3])}{f' and {len(held) - 3} more' if len(held) > 3 else ''}"
        for what, held in groups.items()
        if 0 < len(held) < len(tied)
    ]
    whose = "the fastest" if tied[0].tied else "the fastest of them"
    return f"tied ({tied[0].mark}): the predicted steps of {len(tied)} recipes lie within the error band of {whose}, {tied[0].band:.0%}; what decides between them: {'; '.join(words) or 'nothing that mpbridge knows'}"


def advise(entry: Recipe, one: Outlook, *, reference: int | None = None) -> Advice:
    """Advice on `entry`, whose outlook is `one`; reference: bytes on bf16_mixed's fullest GPU."""
    policy, run = one.policy, one.facts
    if one.errors:
        words = "; ".join(f"{v.rule}: {v.found}" for v in one.errors) + f" (cure: {one.errors[0].cure})"
        return Advice(recipe=entry.name, status=entry.status, legal=False, reason=words)
    try:
        mine = one.memory
    except MpbridgeError as error:
        return Advice(recipe=entry.name, status=entry.status, legal=False, reason=str(error))
    time = None if one.no_time else one.time
    answer = one.capability
    return Advice(
        recipe=entry.name,
        status=entry.status,
        legal=True,
        reason=_reason(entry, policy, run, answer.reason if policy.quantized or not answer.proven else ""),
        bytes=mine.needed,
        relative=mine.needed / reference if reference else None,
        fit=one.answer or "fits",
        peak=peak(policy, run),
        # FP16 has five exponent bits and needs its loss scale: ranked after BF16 wherever BF16 exists
        taste=(policy.quant.row.preference if policy.quant is not None else 0)
        + (10 if policy.compute is DType.FP16 else 0),
        seconds=time.seconds if time else None,
        band=time.band if time else 0.0,
        one_sided=bool(time and time.one_sided),
        speed_known="predicted" if time else "",
        hours=time.gpu_hours_per_billion_tokens if time else None,
    )


def peak(policy: PrecisionPolicy, run: RunFacts) -> float | None:
    """The dense peak of the policy's GEMMs as a multiple of 16-bit ones' on the run's GPU, by the vendor's table; None: unknown."""
    machine = run.machine
    if machine is None or not machine.gpu:
        return None
    mine, base = machine.flops(policy.narrowest), machine.flops("bf16") or machine.flops("fp16")
    return mine / base if mine and base else None


def _reason(entry: Recipe, policy: PrecisionPolicy, run: RunFacts, native: str) -> str:
    parts = [entry.summary]
    gain = peak(policy, run)
    if gain is not None and policy.quantized:
        parts.append(f"GEMMs {gain:.1f} x BF16's peak")
    if policy.quantized:
        depth = run.shape.num_layers
        kept = policy.bf16_layers(depth)
        parts.append(f"{depth - len(kept)} of {depth} layers quantized")
    if native and ("unproven" in native or "MXFP8" in native):
        parts.append(native)
    return "; ".join(parts)
