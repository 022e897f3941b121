"""What a rehearsal measures at its end: the gradient's error against high precision, and the error of every linear's three products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mpbridge.backend.devices.gather import from_all
from mpbridge.precision.regions import GEMMS, Gemm, Quant
from mpbridge.settings.training import microbatches
from mpbridge.training.process import data_parallel
from mpbridge.training.tune.proof import YARDSTICK, EngineSubject, GradientError, prove
from mpbridge.training.tune.scores import Scorer, merged

if TYPE_CHECKING:
    from mpbridge.training.base import Training

BATCHES = 4
"""Global batches on which gradients are compared."""
OWN_ERROR: Mapping[tuple[str, str], float] = {
    ("e4m3", "x"): 0.0265,
    ("e4m3", "w"): 0.0265,
    ("e4m3", "dy"): 0.0265,
    ("e5m2", "dy"): 0.0527,
    ("e2m1", "x"): 0.095,
    ("e2m1", "w"): 0.112,
    ("e2m1", "dy"): 0.137,
}
"""(format, side) -> median row error of a Gaussian tensor: the error of rounding alone, when nothing goes wrong. Measured on 1024 x 1024 elements
of N(0,1); NVFP4's weights share a scale among 16 x 16 elements and its gradients are rounded stochastically, hence three numbers."""
SIDES: Mapping[Gemm, tuple[str, str]] = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
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
    """Worst first; empty under delayed scaling, whose scales depend on earlier batches."""

    def verdict(self) -> tuple[Literal["sound", "look closer", "damage"], list[str]]:
        """A verdict, and the reasons for it."""
        one = self.gradient
        figures = f"gradient error {one.error:.3f} (noise {one.noise:.3f}, bias {one.bias:.3f} of the gradient, per global batch)"
        if not math.isfinite(one.error):
            return "damage", ["the gradient is not finite, although high precision's is"]
        if max(one.noise, one.bias) > YARDSTICK:
            what = "noise" if one.noise >= one.bias else "bias"
            cure = (
                "a larger global batch averages noise out"
                if what == "noise"
                else "a larger batch does not average bias out"
            )
            return "damage", [f"{figures}: {what} is above 1/sqrt 3 = {YARDSTICK:.3f}, where training degrades; {cure}"]
        some = [product for product in self.products if product.excess > EXCESS]
        if some:
            lines = [
                f"{len(some)} of {len(self.products)} linears have products off by more than {EXCESS:g} times the format's own error"
            ]
            return "look closer", [
                figures,
                *lines,
                *(
                    f"{one.linear}: " + ", ".join(f"{gemm} {error:.1%}" for gemm, error in one.errors.items())
                    for one in some[:4]
                ),
            ]
        return "sound", [f"{figures}: below 1/sqrt 3 = {YARDSTICK:.3f}"]

    def as_data(self) -> dict[str, Any]:
        """In JSON types."""
        products = [{"linear": one.linear, **one.errors, "excess": one.excess} for one in self.products]
        return {"gradient": {**self.gradient.as_data(), "errors": self.gradient.errors}, "products": products}


def measure(training: Training) -> RecipeMeasurement | None:
    """The figures of an emulated run in its current state; None on an engine that does not expose its gradients (FSDP). Every rank calls it.

    Weights do not change; scales of delayed scaling continue from their current state.
    """
    engine = training.engine
    if not hasattr(engine, "counted_gradients"):
        return None
    emulation: Any = getattr(engine, "emulation", None)
    if emulation is None or not hasattr(emulation, "listening"):
        return None
    rank, ranks = data_parallel()
    subject = EngineSubject(
        engine, training.feed, microbatches=microbatches(training.run.train, ranks), rank=rank, ranks=ranks
    )
    gradient = prove(subject, {"own": emulation.policy}, BATCHES, split="train")["own"]
    quants: dict[str, Quant] = {quant.scaling: quant for quant in emulation.policy.quants if not quant.row.history}
    scorer = Scorer(quants, emulation)
    if quants:
        with emulation.listening(scorer):
            subject.backward("train", 0)
    own = {name: plug.quantizer.quant.scaling for name, plug in emulation.plugs.items()}
    found = []
    known = {slot: scaling for part in from_all(own) for slot, scaling in part.items()}
    for (slot, scaling), sums in merged(from_all(scorer.halves[0])).items():
        if known.get(slot) == scaling:
            errors = {gemm: sums.relative(gemm) for gemm in GEMMS}
            excess = max(error / _own(quants[scaling], gemm) for gemm, error in errors.items())
            found.append(ProductErrors(linear=slot, errors=errors, excess=excess))
    return RecipeMeasurement(gradient=gradient, products=sorted(found, key=lambda one: -one.excess))


def _own(quant: Quant, gemm: Gemm) -> float:
    """The format's error for that product of Gaussian operands: both operands' errors, which are independent."""
    errors = (OWN_ERROR[quant.element(gradient=side == "dy"), side] for side in SIDES[gemm])
    return math.sqrt(sum(error * error for error in errors))
