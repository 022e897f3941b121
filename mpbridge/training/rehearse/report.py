"""The result of a rehearsal: per recipe its losses, its tensors' statistics and a plain verdict. Data, JSON and tables; the charts are in
`page`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mpbridge.common.files import write
from mpbridge.common.tables.table import Table, table
from mpbridge.training.rehearse.measure import OWN_ERROR, RecipeMeasurement

SCHEMA = 1
RehearsalVerdict = Literal["high precision", "sound", "look closer", "damage", "failed", "interrupted"]
TONES: Mapping[str, str] = {"look closer": "warn", "damage": "bad", "failed": "bad", "interrupted": "warn"}
"""Verdict -> how it is marked; the others are not."""
TensorSummary = Mapping[str, Any]
"""A tensor's summary: what mpbridge.numerics's Track.summary returns."""

NO_RANKING = (
    "The verdicts are about the effect of rounding on gradients and products (on operands, where an engine does not expose its gradients). They do not "
    "rank recipes: over a rehearsal of this length the loss curves of all recipes lie within noise of each other."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits above which a tensor is worth a look, and above which it is damaged: (first, second) for each."""

    row_error: tuple[float, float]
    """The first as a multiple of OWN_ERROR, the second as an error."""
    flushed: tuple[float, float]
    saturated: tuple[float, float]
    staleness: tuple[float, float] = (1.0, 4.0)
    """In powers of two: (too large a scale, which saturates, too small a one, which wastes range). Worth a look, but no damage by itself: its
    effect shows as saturation, flushing or error."""


LIMITS: Mapping[int, Limits] = {
    8: Limits(row_error=(2.0, 0.25), flushed=(0.05, 0.25), saturated=(0.001, 0.01)),
    # a Gaussian tensor in NVFP4 flushes 7 to 10 % and clips 3 %: the block scale is rounded to E4M3 and may come out low
    4: Limits(row_error=(2.0, 0.5), flushed=(0.2, 0.5), saturated=(0.06, 0.15)),
}
"""Bits of an element -> limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """What is wrong with one tensor."""

    tensor: str
    copy: str
    what: str
    severe: bool


@dataclass(slots=True, kw_only=True)
class Rehearsed:
    """One recipe's part of a rehearsal."""

    recipe: str
    losses: list[float] = field(default_factory=list)
    """Loss of every step, nats per token."""
    seconds: float = 0.0
    quantized: int = 0
    """Number of linears whose GEMMs were quantized."""
    high: int = 0
    """Number of linears that the recipe keeps in high precision."""
    notes: list[str] = field(default_factory=list)
    """What differs from the GPU, one sentence each."""
    tensors: Sequence[TensorSummary] = ()
    failure: str | None = None
    """Why the recipe could not be rehearsed."""
    interrupted: str | None = None
    """The signal and the step after which it ended; its tensors are those of a part, which has no verdict."""
    measured: RecipeMeasurement | None = None
    """Gradients and products against high precision's; None on an engine that does not expose its gradients: the verdict is then about operands."""

    @property
    def complaints(self) -> list[Complaint]:
        """All complaints, the severe ones first."""
        return sorted((c for row in self.tensors for c in complaints(row)), key=lambda c: not c.severe)

    @property
    def worst(self) -> list[TensorSummary]:
        """The ten tensors with the largest median row error relative to their format's own error, preceded by those with NaN."""
        return sorted(self.tensors, key=lambda row: -_excess(row))[:10]

    def verdict(self) -> tuple[RehearsalVerdict, list[str]]:
        """A verdict, and the reasons for it in sentences."""
        if self.failure is not None:
            return "failed", [self.failure]
        if self.interrupted is not None:
            return "interrupted", [self.interrupted]
        broken = next((i for i, loss in enumerate(self.losses, start=1) if not math.isfinite(loss)), None)
        if broken is not None:
            return "failed", [f"the loss of step {broken} is not finite"]
        if not self.tensors:
            return "high precision", ["no GEMM is quantized"]
        found = self.complaints
        if self.measured is not None:
            broken_operands = [c for c in found if "infinities or NaN" in c.what]
            word, reasons = self.measured.verdict()
            return ("damage" if broken_operands else word), [*_reasons(broken_operands, len(self.tensors)), *reasons]
        if not found:
            return "sound", [f"each of the {len(self.tensors)} operands stays within its format's own error"]
        return ("damage" if found[0].severe else "look closer"), _reasons(found, len(self.tensors))

    def as_data(self) -> dict[str, Any]:
        """In JSON types."""
        word, reasons = self.verdict()
        return asdict(self) | {
            "measured": None if self.measured is None else self.measured.as_data(),
            "verdict": {"word": word, "reasons": reasons},
            "worst": [f"{row['tensor']} ({row['copy']})" for row in self.worst],
            "layers": by_layer(self.tensors),
        }


@dataclass(slots=True, kw_only=True)
class Rehearsal:
    """All recipes, and how the rehearsal was made."""

    title: str
    made: dict[str, Any]
    """Steps, seed, versions ...: what is needed to repeat it."""
    recipes: list[Rehearsed] = field(default_factory=list)
    suggestion: list[str] = field(default_factory=list)
    """The result of tuning one of the recipes, as lines; empty if not requested."""

    def _repr_html_(self) -> str:
        """For notebooks: one row per recipe."""
        words = [recipe.verdict() for recipe in self.recipes]
        rows = [
            (recipe.recipe, word, *overall(recipe), reasons[0])
            for recipe, (word, reasons) in zip(self.recipes, words, strict=True)
        ]
        tones = [TONES.get(word, "") for word, _ in words]
        columns = ("recipe", "verdict", *OVERALL, "why")
        return table(self.title, columns, rows, tones=tones, note=NO_RANKING).html()

    def as_data(self) -> dict[str, Any]:
        """In JSON types."""
        return {
            "schema": SCHEMA,
            "title": self.title,
            "made": self.made,
            "remark": NO_RANKING,
            "suggestion": self.suggestion,
            "recipes": [recipe.as_data() for recipe in self.recipes],
        }

    def write(self, path: Path) -> None:
        """Writes JSON; numbers that JSON cannot represent become null."""
        write(path, json.dumps(_finite(self.as_data()), indent=1) + "\n")


def complaints(row: TensorSummary) -> list[Complaint]:
    """What is wrong with one tensor, one sentence each, with the number and the limit."""
    limits = LIMITS[4 if row["format"] == "e2m1" else 8]
    own = OWN_ERROR.get((row["format"], row["side"]), 0.0265)
    error = row["row_error"] or 0.0
    first, second = own * limits.row_error[0], limits.row_error[1]
    checks: list[tuple[float, float, float, str]] = [
        (error, first, second, f"its median row is off by {error:.0%} of its norm (its format's own error: {own:.1%})"),
        (row["flushed"], *limits.flushed, f"{row['flushed']:.1%} of its nonzero elements become zero"),
        (row["saturated"], *limits.saturated, f"{row['saturated']:.2%} of its elements saturate"),
    ]
    if row["staleness"] is not None:
        stale = row["staleness"]
        limit, effect = (
            (limits.staleness[0], "elements saturate") if stale < 0 else (limits.staleness[1], "range is wasted")
        )
        checks.append((abs(stale), limit, math.inf, f"its delayed scale is off by 2**{stale:+.1f}: {effect}"))
    found = [
        Complaint(tensor=row["tensor"], copy=row["copy"], what=text, severe=value > most)
        for value, some, most, text in checks
        if value > some
    ]
    if row["nonfinite"]:
        found.append(
            Complaint(tensor=row["tensor"], copy=row["copy"], what=f"{row['nonfinite']} infinities or NaN", severe=True)
        )
    return found


def _reasons(found: list[Complaint], operands: int) -> list[str]:
    reasons = []
    for severe, word in ((True, "damaged"), (False, "worth a look")):
        some = [c for c in found if c.severe is severe]
        names = list(dict.fromkeys(f"{c.tensor} ({c.copy})" for c in some))
        if names:
            reasons.append(f"{len(names)} of {operands} operands {word}")
            reasons += [f"{c.tensor} ({c.copy}): {c.what}" for c in some[: 4 if severe else 2]]
    return reasons


def _excess(row: TensorSummary) -> float:
    if row["nonfinite"]:  # the errors are those of the finite elements
        return math.inf
    return (row["row_error"] or 0.0) / OWN_ERROR.get((row["format"], row["side"]), 0.0265)


def by_layer(rows: Iterable[TensorSummary]) -> dict[str, dict[str, float]]:
    """Layer -> 'linear_qkv.x row' -> median row error; a tensor outside of any numbered layer is under ''."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        layer, kind = place(row)
        found.setdefault(layer, {})[kind] = row["row_error"] or 0.0
    return found


def place(row: TensorSummary) -> tuple[str, str]:
    """(layer number as text, the rest of the name with side and copy)."""
    parts = str(row["slot"]).split(".")
    number = next((part for part in parts if part.isdigit()), "")
    rest = ".".join(parts[parts.index(number) + 1 :]) if number else ".".join(parts)
    return number, f"{rest or number}.{row['side']} {row['copy']}"


def tables(rehearsal: Rehearsal) -> list[Table]:
    """For the terminal: one row per recipe, then the worst tensors of each."""
    columns = ("recipe", "verdict", "loss", "gradient error", "bias", "noise", *OVERALL, "s")
    rows, tones = [], []
    for recipe in rehearsal.recipes:
        word, _ = recipe.verdict()
        loss = f"{recipe.losses[-1]:.4f}" if recipe.losses else ""
        rows.append((recipe.recipe, word, loss, *gradients(recipe), *overall(recipe), f"{recipe.seconds:.0f}"))
        tones.append(TONES.get(word, ""))
    found = [table(rehearsal.title, columns, rows, right=columns[2:], tones=tones)]
    for recipe in rehearsal.recipes:
        if recipe.tensors:
            found.append(_worst(recipe))
    return found


def caveats(rehearsal: Rehearsal) -> str:
    """For the terminal: what the verdicts do not cover, and what differs from the GPU under any of the recipes."""
    notes = dict.fromkeys(note for recipe in rehearsal.recipes for note in recipe.notes)
    return "\n".join(
        [NO_RANKING, *(["What differs from the GPU:"] if notes else []), *(f"  - {note}" for note in notes)]
    )


def gradients(recipe: Rehearsed) -> tuple[str, str, str]:
    """Error of a global batch's gradient over its norm, its bias and its noise, as text."""
    if recipe.measured is None:
        return "", "", ""
    one = recipe.measured.gradient
    return f"{one.error:.3f}", f"{one.bias:.3f}", f"{one.noise:.3f}"


OVERALL = ("row error", "flushed", "saturated", "SQNR dB")


def overall(recipe: Rehearsed) -> tuple[str, str, str, str]:
    """OVERALL as text: largest row error, flushed and saturated share, and lowest SQNR of any tensor."""
    if not recipe.tensors:
        return "", "", "", ""
    top = {name: max((row[name] or 0.0) for row in recipe.tensors) for name in ("row_error", "flushed", "saturated")}
    noise = [row["sqnr"] for row in recipe.tensors if row["sqnr"] is not None]
    return (*(f"{top[name]:.2%}" for name in top), f"{min(noise):.1f}" if noise else "")  # type: ignore[return-value]


COLUMNS = ("tensor", "copy", "GEMMs", "format", "row error", "rel. error", "flushed", "saturated", "SQNR dB", "stale")


def cells(row: TensorSummary) -> tuple[str, ...]:
    """A tensor's row of the tables: COLUMNS as text."""
    percent = (
        f"{row[name]:.2%}" if row[name] is not None else ""
        for name in ("row_error", "relative_error", "flushed", "saturated")
    )
    noise = f"{row['sqnr']:.1f}" if row["sqnr"] is not None else ""
    stale = f"2**{round(row['staleness'], 1) + 0.0:+.1f}" if row["staleness"] is not None else ""
    return row["tensor"], row["copy"], " ".join(row["gemms"]), row["format"], *percent, noise, stale


def _worst(recipe: Rehearsed) -> Table:
    word, reasons = recipe.verdict()
    title = f"{recipe.recipe}: {word}. {reasons[0]}. The worst tensors:"
    return table(title, COLUMNS, map(cells, recipe.worst), right=COLUMNS[2:])


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
