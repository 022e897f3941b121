"""Rows of a certificate, the variants of NVFP4 that it compares with, and its rows about a run's optimizer: lost updates, moments that stand still, gradients summed in a narrow buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mpbridge.common.facts import ADAMS
from mpbridge.common.formats import DType
from mpbridge.planning import closed_forms
from mpbridge.precision.policy import PrecisionPolicy

Part = Literal["operand", "gemm", "second pass", "optimizer", "attention"]
Derivation = Literal["exact", "closed form", "bound", "measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A figure, the bound that holds for it, and how it was obtained."""

    part: Part
    where: str
    """What it is about: 'wgrad dy column', 'dgrad', 'weights'."""
    quantity: str
    value: float
    tensor: str = ""
    """Kind of data: 'normal', 'trained:NAME'; empty if it depends on none."""
    ci95: float | None = None
    """Half the width of the 95 % interval over independent tensors (Student's t)."""
    bound: float | None = None
    derivation: Derivation = "measured"
    """exact: a sum over all outcomes of the rounding on the given tensors; closed form: a formula under a stated assumption."""
    condition: str = ""
    """When it applies, or the formula."""

    def as_data(self) -> dict[str, Any]:
        """The row as JSON types, without fields that are not set."""
        found = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in found.items() if value not in (None, "")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A change of a scaling that certificates compare with."""

    name: str
    words: str
    options: tuple[tuple[str, Any], ...] = ()
    """Options of the scaling (precision/scalings/rows.py)."""
    rules: tuple[tuple[str, Any], ...] = ()
    """Fields of `scales.Rules` that no release has; for gradients only, since rounding to nearest needs no room above a block's maximum, and is
    biased upwards by it."""
    eden: str = ""
    """'fixed' or 'redrawn': gradients by MS-EDEN with such signs."""

    @property
    def offered(self) -> bool:
        """Whether Transformer Engine can do it."""
        return not self.rules and not self.eden


_OWN_ROTATION = (("hadamard", False),)
"""MS-EDEN rotates by itself, and its result is rotated back."""
VARIANTS: Mapping[str, Variant] = {
    one.name: one
    for one in (
        Variant(name="no-sr", words="gradients rounded to nearest", options=(("stochastic_rounding", False),)),
        Variant(name="no-rht", words="no Hadamard transform", options=(("hadamard", False),)),
        Variant(name="1d-weights", words="weights with one scale per 16 elements", options=(("square_weights", False),)),
        Variant(name="4over6", words="weights choose between 6 and 4", options=(("four_over_six", "weights"),)),
        Variant(name="scale-up", words="the gradients' block scales rounded up", rules=(("nvfp4_scale_up", True),)),
        Variant(name="headroom", words="the gradients' block maxima mapped to 6 * 16/17", rules=(("nvfp4_headroom", 17 / 16),)),
        Variant(name="ms-eden", words="gradients by MS-EDEN, signs redrawn at every step", options=_OWN_ROTATION, eden="redrawn"),
        Variant(name="ms-eden-fixed", words="gradients by MS-EDEN, one set of signs", options=_OWN_ROTATION, eden="fixed"),
    )
}  # fmt: skip
"""Name -> variant of NVFP4."""
NOT_OFFERED = "no stack offers this yet"

NOTABLE = 0.1
"""Share of lost updates from which on `check` quotes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a run does to its weights."""

    sigma: float
    """Standard deviation of the weights: as initialized, or as measured."""
    points: tuple[tuple[float, float], ...]
    """(share of the schedule, learning rate)."""
    name: str = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    micro_batches: int = 1
    """Gradients summed in a buffer per step."""

    @property
    def peak(self) -> float:
        """The largest learning rate."""
        return max((lr for _, lr in self.points), default=0.0)


def stored_weights(policy: PrecisionPolicy) -> DType:
    """The dtype of the weights that the optimizer updates."""
    return policy.params if policy.narrow_alone else policy.main_params or DType.FP32


def lost_line(policy: PrecisionPolicy, training: Training) -> str | None:
    """The sentence of `check` if the run is about to lose a notable share of its updates; None otherwise."""
    kind = stored_weights(policy)
    rates = sorted({lr for _, lr in training.points if lr > 0}, reverse=True)
    if kind is DType.FP32 or training.name not in ADAMS or not rates:
        return None
    lost = [closed_forms.lost_updates(lr, training.sigma, kind, beta1=training.beta1) for lr in rates]
    if max(lost) <= NOTABLE:
        return None
    text = closed_forms.warning(rates[0], training.sigma, kind, beta1=training.beta1)
    return text if len(rates) == 1 else f"{text}; {lost[-1]:.0%} at the schedule's lowest, {rates[-1]:.2g}"


def optimizer_rows(policy: PrecisionPolicy, training: Training) -> list[Row]:
    """Every row that the policy's dtypes have something to say about. Of another optimizer than Adam only the gradient buffer's."""
    adam = training.name in ADAMS
    moments = [*_first(policy, training), *_second(policy, training)] if adam else []
    return [*(_weights(policy, training) if adam else ()), *moments, *_sums(policy, training)]


def _weights(policy: PrecisionPolicy, training: Training) -> Iterator[Row]:
    kind = stored_weights(policy)
    where = f"{kind.short} weights"
    lowest = min((lr for _, lr in training.points if lr > 0), default=0.0)
    rates = {"peak": training.peak} | ({"lowest": lowest} if lowest < training.peak else {})
    for word, lr in rates.items():
        if lr <= 0:
            continue
        lost = closed_forms.lost_updates(lr, training.sigma, kind, beta1=training.beta1)
        kept = closed_forms.movement_kept(lr, training.sigma, kind, beta1=training.beta1)
        text = f"{word} lr {lr:.3g}, weights N(0, {training.sigma:.3g}), m/sqrt(v) of pure noise"
        yield Row(part="optimizer", where=where, quantity=f"updates lost, {word} lr", value=lost, derivation="closed form", condition=text)  # fmt: skip
        yield Row(part="optimizer", where=where, quantity=f"movement kept, {word} lr", value=kept, derivation="closed form", condition=text)  # fmt: skip
    if training.weight_decay and kind is not DType.FP32:
        bound = 2.0 ** -(closed_forms.mantissa_of(kind) + 2)
        lost = float(training.peak * training.weight_decay < bound)
        yield Row(part="optimizer", where=where, quantity="weight decay lost", value=lost, bound=bound, derivation="exact",
                  condition=f"lr * weight decay = {training.peak * training.weight_decay:.2g} moves no weight on its own below {bound:.2g}")  # fmt: skip


def _first(policy: PrecisionPolicy, training: Training) -> Iterator[Row]:
    kind = policy.exp_avg or DType.FP32
    if kind is DType.FP32:
        return
    stall = closed_forms.first_moment_stalls(kind, training.beta1)
    yield Row(part="optimizer", where=f"{_word(kind)} first moment", quantity="stands still", value=stall, derivation="closed form",
              condition=f"beta1 {training.beta1:g}, gradients of pure noise")  # fmt: skip


def _second(policy: PrecisionPolicy, training: Training) -> Iterator[Row]:
    kind = policy.exp_avg_sq or DType.FP32
    if kind is DType.FP32:
        return
    where = f"{_word(kind)} second moment"
    stall = closed_forms.second_moment_stalls(kind, training.beta2)
    falls = closed_forms.second_moment_can_fall(kind, training.beta2)
    yield Row(part="optimizer", where=where, quantity="stands still", value=stall, derivation="closed form",
              condition=f"beta2 {training.beta2:g}; g*g/v chi-square{'' if falls else '; with a zero gradient it never falls'}")  # fmt: skip
    ratio = closed_forms.flush_ratio(kind)
    if ratio is not None:
        yield Row(part="optimizer", where=where, quantity="flushed below amax/", value=ratio, derivation="exact",
                  condition="a gradient smaller than the tensor's largest by this factor leaves a second moment of zero")  # fmt: skip
        largest = 1 / training.eps
        yield Row(part="optimizer", where=where, quantity="update/lr per unit of m", value=largest, bound=largest, derivation="bound",
                  condition="|m|/eps where the second moment was flushed and the gradient is zero")  # fmt: skip


def _sums(policy: PrecisionPolicy, training: Training) -> Iterator[Row]:
    kind, count = policy.reduce, training.micro_batches
    if count < 2:
        return
    yield Row(part="optimizer", where=f"{kind.short} gradient buffer", quantity="sum bits", value=closed_forms.accumulation_bits(kind, count),
              derivation="closed form", condition=f"{count} micro-batches of zero-mean gradients; equal ones stop adding up at {closed_forms.accumulation_stops_at(kind):,}")  # fmt: skip


def _word(kind: DType) -> str:
    return "fp8" if kind is DType.UINT8 else kind.short


def sentence(policy: PrecisionPolicy, training: Training) -> str:
    """What the optimizer loses, in one sentence; '' if nothing notable."""
    found = [lost_line(policy, training) or ""]
    if training.name in ADAMS:
        kind = policy.exp_avg_sq or DType.FP32
        ratio, stall = closed_forms.flush_ratio(kind), closed_forms.second_moment_stalls(kind, training.beta2)
        if ratio is not None and ratio < 1e5:
            found.append(
                f"a gradient below 1/{ratio:.0f} of its tensor's largest loses its FP8 second moment, and its next update is |m|/eps"
            )
        if stall > NOTABLE:
            text = f"{stall:.0%} of steps leave a {_word(kind)} second moment where it is"
            found.append(f"{text} (beta2 {training.beta2:g})")
    count = training.micro_batches
    if count > 1 and (bits := closed_forms.accumulation_bits(policy.reduce, count)) < 7:
        found.append(f"summing {count} micro-batches in {policy.reduce.short} leaves {bits:.1f} bits")
    return "; ".join(filter(None, found))
