"""The result of a rehearsal: per recipe its losses, its tensors' statistics, gradients and products against high precision's, and a plain verdict. Data, JSON and tables; the
charts are in `page`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mpbridge.common.files import write
from mpbridge.common.pages.about import OPERAND_COLUMNS
from mpbridge.common.tables import Column, Table, table
from mpbridge.precision.regions import Gemm
from mpbridge.training.tune.proof import YARDSTICK, GradientError

OWN_ERROR: Mapping[tuple[str, str], float] = {
    ("e4m3", "x"): 0.0265, ("e4m3", "w"): 0.0265, ("e4m3", "dy"): 0.0265, ("e5m2", "dy"): 0.0527, ("e2m1", "x"): 0.095,
    ("e2m1", "w"): 0.112, ("e2m1", "dy"): 0.137,
}  # fmt: skip
"""(format, side) -> median row error of a Gaussian tensor: the error of rounding alone, when nothing goes wrong. Measured on 1024 x 1024 elements
of N(0,1); NVFP4's weights share a scale among 16 x 16 elements and its gradients are rounded stochastically, hence three numbers."""
EXCESS = 2.0
"""Multiple of the error that the format causes for Gaussian tensors, above which a product is worth a look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductErrors:
    """One linear."""

    linear: str
    errors: Mapping[Gemm, float]
    """||e|| / ||output||."""
    excess: float
    """The largest of them relative to the format's error for Gaussian tensors."""


def place_of(linear: str) -> tuple[str, str]:
    """(layer number as text, the name below it); ('', name) outside of any numbered layer."""
    parts = linear.split(".")
    number = next((part for part in parts if part.isdigit()), "")
    return number, ".".join(parts[parts.index(number) + 1 :]) if number else linear


@dataclass(slots=True, kw_only=True)
class RecipeMeasurement:
    """The figures of one recipe."""

    gradient: GradientError
    products: list[ProductErrors] = field(default_factory=list)
    """Worst first; empty under delayed scaling, whose scales depend on earlier batches, and with torchao's own linears."""

    def verdict(self) -> tuple[Literal["sound", "look closer", "damage"], list[str]]:
        """A verdict, and the reasons for it."""
        one = self.gradient
        figures = f"gradient error {one.error:.3f} (noise {one.noise:.3f}, bias {one.bias:.3f} of the gradient, per global batch)"
        if not math.isfinite(one.error):
            return "damage", ["the gradient is not finite, although high precision's is"]
        if max(one.noise, one.bias) > YARDSTICK:
            what, cure = "bias", "a larger batch does not average bias out"
            if one.noise >= one.bias:
                what, cure = "noise", "a larger global batch averages noise out"
            return "damage", [f"{figures}: {what} is above 1/sqrt 3 = {YARDSTICK:.3f}, where training degrades; {cure}"]
        some = [product for product in self.products if product.excess > EXCESS]
        if some:
            off = f"off by more than {EXCESS:g} times the format's own error"
            reasons = [figures, f"{len(some)} of {len(self.products)} linears have products {off}"]
            for product in some[:4]:
                errors = ", ".join(f"{gemm} {error:.1%}" for gemm, error in product.errors.items())
                reasons.append(f"{product.linear}: {errors}")
            return "look closer", reasons
        return "sound", [f"{figures}: below 1/sqrt 3 = {YARDSTICK:.3f}"]

    def as_data(self) -> dict[str, Any]:
        """In JSON types."""
        products = [{"linear": one.linear, **one.errors, "excess": one.excess} for one in self.products]
        return {"gradient": {**self.gradient.as_data(), "errors": self.gradient.errors}, "products": products}


SCHEMA = 1
RehearsalVerdict = Literal["high precision", "sound", "look closer", "damage", "failed", "interrupted"]
TONES: Mapping[str, str] = {"look closer": "warn", "damage": "bad", "failed": "bad", "interrupted": "warn"}
"""Verdict -> how it is marked; the others are not."""
TensorSummary = Mapping[str, Any]
"""A tensor's summary: what mpbridge.numerics's Track.summary returns."""

NO_RANKING = (
    "The verdicts are about the effect of rounding on gradients and products. They do not rank recipes: over a rehearsal of this length the loss curves of "
    "all recipes lie within noise of each other."
)


OPERANDS = [
    OPERAND_COLUMNS["layer"],
    Column(name="tensor", number=False, help="linear and operand: x activations, w weights, dy gradients"),
    Column(name="copy", number=False, help="row or column copy"),
    OPERAND_COLUMNS["GEMMs"],
    OPERAND_COLUMNS["format"],
    OPERAND_COLUMNS["row error"],
    Column(name="relative error", unit="percent", help="error over norm of the whole tensor"),
    OPERAND_COLUMNS["flushed"],
    OPERAND_COLUMNS["saturated"],
    OPERAND_COLUMNS["SQNR, dB"],
    OPERAND_COLUMNS["staleness, log2"],
]
OVERVIEW = [
    Column(name="recipe", number=False),
    Column(name="verdict", number=False),
    Column(name="last loss", help="nats per token, of the last step"),
    Column(
        name="gradient error",
        help="||g_q - g|| / ||g|| of a global batch, g in high precision; mean over a few batches",
    ),
    Column(name="bias", help="the part of it that is the same in every batch: a larger batch does not average it out"),
    Column(name="noise", help="the rest of it; training degrades above 0.577, 1 over the square root of 3"),
    Column(name="worst row error", unit="percent", help="of any operand"),
    Column(name="most flushed", unit="percent", help="of any operand"),
    Column(name="most saturated", unit="percent", help="of any operand"),
    Column(name="lowest SQNR, dB", help="of any operand"),
    Column(name="seconds"),
]


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
    """Gradients and products against high precision's; None if nothing is quantized, or it did not get that far."""

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
        if self.measured is None or not self.quantized:
            return "high precision", ["no GEMM is quantized"]
        word, reasons = self.measured.verdict()
        odd = [row for row in self.tensors if row["nonfinite"]]
        if not odd:
            return word, reasons
        count = f"{len(odd)} of {len(self.tensors)} operands have infinities or NaN"
        named = [f"{row['tensor']} ({row['copy']}): {row['nonfinite']} infinities or NaN" for row in odd[:4]]
        return "damage", [count, *named, *reasons]

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
        verdicts = [recipe.verdict() for recipe in self.recipes]
        rows = [[*overview(recipe), why[0]] for recipe, (_, why) in zip(self.recipes, verdicts, strict=True)]
        tones = [TONES.get(word, "") for word, _ in verdicts]
        columns = [*OVERVIEW, Column(name="why", number=False)]
        return table(self.title, columns, rows, tones=tones, note=NO_RANKING).html()

    def as_data(self) -> dict[str, Any]:
        """In JSON types."""
        return {
            "schema": SCHEMA, "title": self.title, "made": self.made, "remark": NO_RANKING,
            "suggestion": self.suggestion, "recipes": [recipe.as_data() for recipe in self.recipes],
        }  # fmt: skip

    def write(self, path: Path) -> None:
        """Writes JSON; numbers that JSON cannot represent become null."""
        write(path, json.dumps(_finite(self.as_data()), indent=1) + "\n")


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
    number, rest = place_of(str(row["slot"]))
    return number, f"{rest or number}.{row['side']} {row['copy']}"


def tables(rehearsal: Rehearsal) -> list[Table]:
    """For the terminal: one row per recipe, then the worst tensors of each."""
    tones = [TONES.get(recipe.verdict()[0], "") for recipe in rehearsal.recipes]
    found = [table(rehearsal.title, OVERVIEW, map(overview, rehearsal.recipes), tones=tones)]
    for recipe in rehearsal.recipes:
        if recipe.tensors:
            word, reasons = recipe.verdict()
            title = f"{recipe.recipe}: {word}. {reasons[0]}. The worst tensors:"
            found.append(table(title, OPERANDS, map(operand, recipe.worst)))
    return found


def overview(recipe: Rehearsed) -> list[Any]:
    """A recipe's row of OVERVIEW; None where there is no figure."""
    measured = recipe.measured.gradient if recipe.measured is not None else None
    error = (None, None, None) if measured is None else (measured.error, measured.bias, measured.noise)
    names = ("row_error", "flushed", "saturated")
    tops = (max((row[name] or 0.0 for row in recipe.tensors), default=None) for name in names)
    noise = min((row["sqnr"] for row in recipe.tensors if row["sqnr"] is not None), default=None)
    return [
        recipe.recipe, recipe.verdict()[0], _short(recipe.losses[-1], 4) if recipe.losses else None,
        *(_short(value, 3) for value in error), *tops, _short(noise, 1), round(recipe.seconds, 1),
    ]  # fmt: skip


def operand(row: TensorSummary) -> list[Any]:
    """A tensor's row of OPERANDS."""
    shares = (row[name] for name in ("row_error", "relative_error", "flushed", "saturated"))
    figures = (*shares, _short(row["sqnr"], 1), _short(row["staleness"], 1))
    return [place(row)[0], row["tensor"], row["copy"], " ".join(row["gemms"]), row["format"], *figures]


def _short(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits) + 0.0


def caveats(rehearsal: Rehearsal) -> str:
    """For the terminal: what the verdicts do not cover, and what differs from the GPU under any of the recipes."""
    notes = dict.fromkeys(f"  - {note}" for recipe in rehearsal.recipes for note in recipe.notes)
    return "\n".join([NO_RANKING, *(["What differs from the GPU:", *notes] if notes else [])])


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
