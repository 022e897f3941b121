"""The page of a certificate: its sentences, charts and every row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpbridge.common.formats import FORMATS, DType
from mpbridge.common.pages.about import glossary, made_now
from mpbridge.common.pages.document import Page
from mpbridge.common.tables import Column
from mpbridge.numerics.certificates.certificate import Certificate
from mpbridge.numerics.certificates.expected import stochastic_e2m1
from mpbridge.numerics.certificates.figures import concentration
from mpbridge.numerics.codes import round_nearest
from mpbridge.planning.closed_forms import lost_updates
from mpbridge.precision.regions import GEMMS

_COLUMNS = (
    Column(name="part", number=False),
    Column(name="tensor", number=False),
    Column(name="where", number=False),
    Column(name="quantity", number=False),
    Column(name="value"),
    Column(name="95 %", help="half the width of the 95 % interval"),
    Column(name="bound"),
    Column(name="how", number=False, help="exact: a sum over all outcomes; closed form: a formula; measured: on random tensors"),
    Column(name="when", number=False),
)  # fmt: skip


def certificate_page(made: Sequence[Certificate]) -> Page:
    """One certificate, or two side by side."""
    names = [one.recipe + (f" ({one.variant.name})" if one.variant else "") for one in made]
    page = Page(f"Numeric certificate: {' and '.join(names)}", made_now(recipes=", ".join(names), transformer_engine=made[0].te), glossary("amax", "copy", "dgrad, fprop, wgrad", "flushed", "operand", "scale"))  # fmt: skip
    for name, one in zip(names, made, strict=True):
        page.verdicts(name, [{"text": text} for text in one.sentences.values()])
    page.chart(
        "Averaging over steps, fixed normal tensors",
        [(f"{name} {gemm}", points, "") for name, one in zip(names, made, strict=True) for gemm in GEMMS if (points := _averaged(one, gemm))],
        x="steps averaged", y="bits",
    )  # fmt: skip
    title, error = "Error of one element over its magnitude", "root mean square error in codes"
    page.chart(title, _by_magnitude(), x="magnitude in codes", y=error)
    lost = [line for name, one in zip(names, made, strict=True) for line in _lost(name, one)]
    if lost:
        x, y = "share of the schedule, percent", "share of updates lost"
        page.chart("Updates lost over the schedule", lost, x=x, y=y)
    for name, one in zip(names, made, strict=True):
        page.table(name, _COLUMNS, [(r.part, r.tensor, r.where, r.quantity, r.value, r.ci95, r.bound, r.derivation, r.condition) for r in one.rows])  # fmt: skip
    return page


def _averaged(one: Certificate, gemm: str) -> list[tuple[float, float]]:
    first, plateau = (one.value(gemm, name) for name in ("one step bits", "plateau bits"))
    if first is None or plateau is None:
        return []
    return [(float(n), value) for n, value in concentration(first, plateau, tuple(4**k for k in range(8)))]


def _by_magnitude() -> list[tuple[str, list[tuple[float, float]], str]]:
    size = torch.linspace(0, 6.5, 261, dtype=torch.float64)
    mean, variance, _ = stochastic_e2m1(size)
    lines = {"E2M1, stochastic": ((mean - size).square() + variance).sqrt()}
    for name in ("e2m1", "e4m3", "e5m2"):
        lines[f"{name.upper()}, to nearest"] = (round_nearest(size.float(), FORMATS[name]).double() - size).abs()
    return [(name, list(zip(size.tolist(), error.tolist(), strict=True)), "") for name, error in lines.items()]


def _lost(name: str, one: Certificate) -> list[tuple[str, list[tuple[float, float]], str]]:
    """Of BF16 weights without main weights, whatever the recipe keeps: what main weights are for."""
    training = one.training
    if training is None or len(training.points) < 2:
        return []
    sigma, beta1 = training.sigma, training.beta1
    points = [(100 * at, lost_updates(lr, sigma, DType.BF16, beta1=beta1)) for at, lr in training.points]
    return [(f"BF16 weights at the rates of {name}", points, "")]
