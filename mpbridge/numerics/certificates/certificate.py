"""A recipe's certificate: its rows, and one sentence for each GEMM and for the recipe."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mpbridge.common.facts import MUONS
from mpbridge.common.formats import E2M1, E4M3
from mpbridge.numerics.certificates import figures
from mpbridge.numerics.certificates.expected import Expected, Operands, cast
from mpbridge.numerics.certificates.figures import KINDS, SIDES, Linear
from mpbridge.numerics.operands import COPY_OF, Side
from mpbridge.numerics.scales import DEFAULT_RELEASE, Release
from mpbridge.planning.certificates import NOT_OFFERED, Row, Training, Variant, optimizer_rows, sentence
from mpbridge.planning.closed_forms import nvfp4_second_pass, second_pass
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import GEMMS, Gemm

REPLICAS = 6
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}
"""Number of tensors -> 97.5 % quantile of Student's t with one degree of freedom less."""
_WORDS = {"fprop": "forward", "dgrad": "input gradient", "wgrad": "weight gradient"}
_NAMES = {"x": "activations", "w": "weights", "dy": "gradients"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Every figure of one recipe."""

    recipe: str
    te: str
    variant: Variant | None = None
    rows: tuple[Row, ...] = ()
    sentences: Mapping[str, str] = field(default_factory=dict)
    """'fprop', 'dgrad', 'wgrad', 'recipe' -> sentence."""
    training: Training | None = None
    seconds: float = 0.0
    """Of one core, which a busy machine does not lengthen."""

    def value(self, where: str, quantity: str, tensor: str = "normal") -> float | None:
        """A figure; None if the certificate lacks it."""
        return next((r.value for r in self.rows if (r.where, r.quantity, r.tensor) == (where, quantity, tensor)), None)

    def as_data(self) -> dict[str, Any]:
        """The certificate as JSON types."""
        found = {
            "recipe": self.recipe,
            "te": self.te,
            "seconds": round(self.seconds, 2),
            "sentences": dict(self.sentences),
            "rows": [r.as_data() for r in self.rows],
        }
        if self.variant is not None:
            found["variant"] = {"name": self.variant.name, "offered": self.variant.offered}
        return found


def certificate(
    recipe: str,
    policy: PrecisionPolicy,
    training: Training,
    *,
    release: Release = DEFAULT_RELEASE,
    variant: Variant | None = None,
    kinds: Iterable[str] = tuple(KINDS),
    own: Mapping[str, Linear] | None = None,
    beside: Iterable[Row] = (),
    replicas: int = REPLICAS,
) -> Certificate:
    """The certificate of a settled policy. own: name -> the user's tensors; beside: rows about them. Raises what `Quantizer` raises."""
    began, threads = time.process_time(), torch.get_num_threads()
    # the operations are small: threads would wait for each other, on a busy machine for long
    torch.set_num_threads(1)
    try:
        maker = _Maker(policy, release, variant)
        samples: dict[str, list[Linear]] = {
            kind: [figures.drawn(kind, seed) for seed in range(replicas)] for kind in kinds
        }
        samples |= {f"yours: {name}": [linear] for name, linear in (own or {}).items()}
        rows = [row for kind, linears in samples.items() for row in maker.rows(kind, linears, replicas)]
        rows += [*maker.second_passes(samples), *optimizer_rows(policy, training)]
        rows += figures.newton_schulz_rows() if training.name in MUONS else ()
        rows += [*figures.attention_rows(maker.compute), *beside]
    finally:
        torch.set_num_threads(threads)
    made = Certificate(recipe=recipe, te=".".join(map(str, release)), variant=variant, rows=tuple(rows), training=training)  # fmt: skip
    said: dict[str, str] = {gemm: maker.sentence(made, gemm, next(iter(samples))) for gemm in GEMMS}
    said["recipe"] = _whole(made, policy, training, variant, next(iter(samples)))
    return replace(made, sentences=said, seconds=time.process_time() - began)


def gradient_error(policy: PrecisionPolicy) -> float:
    """Relative error of one step's input or weight gradient, whichever is larger, on normal tensors: what orders the error of a model's gradient (docs/certificates.md)."""
    found = dict(_Maker(policy, DEFAULT_RELEASE, None)._figures(figures.drawn("normal", 0)))
    return float(max(2.0 ** -found[gemm, "one step bits"] for gemm in ("dgrad", "wgrad")))


class _Maker:
    """Makes the rows of one policy: the rule of each GEMM is that of its last region, which covers what no other does."""

    def __init__(self, policy: PrecisionPolicy, release: Release, variant: Variant | None) -> None:
        self.compute, self.draws = policy.compute.torch(), variant is not None and bool(variant.eden)
        rules = policy.regions[-1].rules
        made: dict[Any, Operands] = {q: Operands(q, release=release, variant=variant) for q in rules.distinct}
        self.operands: dict[Gemm, Operands | None] = {
            gemm: None if (quant := getattr(rules, gemm)) is None or gemm in quant.row.high else made[quant]
            for gemm in GEMMS
        }

    def expected(self, x: torch.Tensor, gemm: Gemm, side: Side) -> Expected:
        """x: FP32."""
        made = self.operands[gemm]
        return cast(x, self.compute) if made is None else made.expected(x.to(self.compute), gemm=gemm, side=side)

    def rows(self, kind: str, linears: list[Linear], replicas: int) -> Iterator[Row]:
        """Rows of operands and GEMMs on tensors of one kind, means over them; of a single linear, over what is drawn beside it."""
        found: dict[tuple[str, str], list[float]] = {}
        for seed in range(max(len(linears), replicas)):
            linear = linears[seed % len(linears)]
            again = seed >= len(linears) and not self.draws
            for key, value in (*(() if again else self._figures(linear)), *self._sampled(linear, seed)):
                found.setdefault(key, []).append(value)
        for (where, quantity), values in found.items():
            gemm, _, rest = where.partition(" ")
            made = self.operands[gemm]  # type: ignore[index]
            limit = figures.bounds(made, rest.split()[0], self.compute).get(quantity) if rest else None  # type: ignore[arg-type]
            exact = len(linears) == 1 and len(set(values)) == 1
            yield Row(
                part="operand" if rest else "gemm", where=where, tensor=kind, quantity=quantity, value=statistics.fmean(values), ci95=None if exact else _interval(values),
                bound=None if limit is None else limit[0], condition="" if limit is None else limit[1],
                derivation="exact" if exact else "measured",
            )  # fmt: skip

    def _figures(self, linear: Linear) -> Iterator[tuple[tuple[str, str], float]]:
        """What the operands decide."""
        sources: dict[Side, torch.Tensor] = {"x": linear.x, "w": linear.w, "dy": linear.dy}
        for gemm, (first, second) in SIDES.items():
            a, b = (self.expected(sources[side], gemm, side) for side in (first, second))
            kind = self.compute if self.operands[gemm] else torch.float32
            exact = sources[first].to(kind).double(), sources[second].to(kind).double()
            for side, one in ((first, a), (second, b)):
                for quantity, value in figures.operand_figures(one).items():
                    yield (f"{gemm} {side} {COPY_OF[gemm, side]}", quantity), value
            for quantity, value in figures.gemm_figures(gemm, a, b, exact).items():
                yield (gemm, quantity), value

    def _sampled(self, linear: Linear, seed: int) -> Iterator[tuple[tuple[str, str], float]]:
        """What a random signal is added for."""
        for gemm in ("dgrad", "wgrad"):
            if (made := self.operands[gemm]) is not None and not self.draws:
                value = figures.gain(made, linear.dy.to(self.compute), gemm, seed)
                yield (f"{gemm} dy {COPY_OF[gemm, 'dy']}", "small-signal gain"), value
        yield ("wgrad", "alignment over fresh data"), self._fresh(linear, seed)

    def _fresh(self, linear: Linear, seed: int) -> float:
        """Along the true gradient: what of it is left after averaging over many batches, less 1."""
        signal = figures.with_signal(linear, seed)
        assert signal.truth is not None
        dy, x = (self.expected(t, "wgrad", side) for t, side in ((signal.dy, "dy"), (signal.x, "x")))  # type: ignore[arg-type]
        reference = figures.product("wgrad", signal.dy.to(self.compute).double(), signal.x.to(self.compute).double())
        found, truth = figures.product("wgrad", dy.mean, x.mean), signal.truth.T.double()
        return float((found * truth).sum() / (reference * truth).sum()) - 1

    def second_passes(self, samples: Mapping[str, list[Linear]]) -> Iterator[Row]:
        """What moves if the forward copies are dequantized to the compute dtype and quantized again."""
        made = self.operands["fprop"]
        if made is None:
            return
        yield from _conditions(made)
        for side in ("x", "w"):
            for kind, linears in samples.items():
                moved = [_moved(made, getattr(one, side).to(self.compute), side, self.compute) for one in linears]
                for index, word in enumerate(("scales moved", "values moved")):
                    values = [one[index] for one in moved]
                    yield Row(part="second pass", where=f"fprop {side} row", tensor=kind, quantity=word, value=statistics.fmean(values), ci95=_interval(values),
                              derivation="exact" if len(values) == 1 else "measured")  # fmt: skip

    def sentence(self, made: Certificate, gemm: Gemm, kind: str) -> str:
        """A GEMM's figures in one sentence."""
        one, plateau = (made.value(gemm, name, kind) or 0.0 for name in ("one step bits", "plateau bits"))
        if math.isinf(one):
            return f"{_WORDS[gemm]}: no error, its operands are not rounded"
        first, second = SIDES[gemm]
        alone = {s: made.value(gemm, f"plateau of the {word} alone", kind) for s, word in ((first, "first"), (second, "second"))}  # fmt: skip
        known = {side: value for side, value in alone.items() if value is not None}
        worst = min(known, key=lambda side: known[side])
        even = len(known) == 2 and abs(known[first] - known[second]) < 0.25
        who = f"{_NAMES[first]} and {_NAMES[second]} alike" if even else f"the rounding of {_NAMES[worst]}"
        text = f"{_WORDS[gemm]}: {one:.1f} bits in one step"
        if plateau - one > 0.05:
            text += f", {plateau:.1f} bits after averaging over steps on fixed tensors, where {who} stop{'' if even else 's'} it"
        else:
            text += f", set by {who}; rounding is the same at every step, so averaging over steps does not help"
        fresh = made.value(gemm, "alignment over fresh data", kind) or 0.0
        if abs(fresh) < 5e-5:
            return text
        return f"{text}; over fresh data {abs(fresh):.2%} of the gradient is {'lost' if fresh < 0 else 'added'}"


def _conditions(made: Operands) -> Iterator[Row]:
    """The exact condition under which a scale moves, and its share with log amax uniform."""
    quantizer = made.quantizer
    if quantizer is not None and quantizer.rule == "e4m3_blocks":
        low, high = nvfp4_second_pass(E2M1, E4M3)
        yield Row(part="second pass", where="block scales", quantity="vanishing blocks", value=math.log2(high / low), derivation="closed form",
                  condition=f"448 * block amax / tensor amax in ({low:.3g}, {high:.3g}]: zero on the second pass; share of the octave above {low:.3g}")  # fmt: skip
        return
    found, powers = second_pass(E4M3 if quantizer is None else quantizer.format_of("x")), True
    if quantizer is not None and quantizer.rule != "e8m0_blocks":
        powers = quantizer._power_of_two and not quantizer.quant.row.history
    yield Row(part="second pass", where="block scales" if powers else "scales", quantity="share that halves", value=found.share if powers else 0.0,
              derivation="closed form", condition=found.condition if powers else "FP32 scales: the largest code returns as itself")  # fmt: skip


def _moved(made: Operands, x: torch.Tensor, side: Any, kind: torch.dtype) -> tuple[float, float]:
    """(share of scales, share of values) that a second pass changes."""
    first = made.expected(x, gemm="fprop", side=side)
    second = made.expected(first.mean.to(kind), gemm="fprop", side=side)
    scales = (second.scale / first.scale - 1).abs() > 2.0**-20
    values = (second.mean - first.mean).abs() > first.mean.abs() * 2.0**-8
    return float(scales.double().mean()), float(values.double().mean())


def _whole(made: Certificate, policy: PrecisionPolicy, training: Training, variant: Variant | None, kind: str) -> str:
    found = {gemm: made.value(gemm, "one step bits", kind) or 0.0 for gemm in GEMMS}
    worst = min(found, key=lambda gemm: found[gemm])
    text = "no product is rounded" if math.isinf(found[worst]) else f"the weakest product is the {_WORDS[worst]}, {found[worst]:.1f} bits in one step"  # fmt: skip
    if variant is not None:
        text = f"{variant.words}{'' if variant.offered else f' ({NOT_OFFERED})'}: {text}"
    lost = sentence(policy, training)
    return f"{text}; {lost}" if lost else f"{text}; the optimizer loses nothing notable"


def _interval(values: list[float]) -> float | None:
    """Half the width of the 95 % interval of the mean."""
    if len(values) < 2 or any(math.isinf(value) for value in values):
        return None
    return _STUDENT.get(len(values), 1.96) * statistics.stdev(values) / math.sqrt(len(values))
