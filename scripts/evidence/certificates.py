"""Certificates of every built-in recipe and of NVFP4's variants, and published figures beside ours: docs/certificates.md. `python scripts/evidence/certificates.py [RECIPE or VARIANT ...]` writes data/certificates.json; with names, only their rows anew."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import torch

from mpbridge import ConfigContainer
from mpbridge.common.formats import E4M3, FORMATS, DType
from mpbridge.numerics.certificates.certificate import Certificate, certificate
from mpbridge.numerics.certificates.expected import Operands, ms_eden
from mpbridge.numerics.certificates.figures import bits, mismatch, operand_figures
from mpbridge.numerics.codes import round_nearest
from mpbridge.planning.certificates import VARIANTS, Variant
from mpbridge.planning.closed_forms import half_gap, second_pass
from mpbridge.precision.policy import Quant
from mpbridge.precision.recipes import BUILT_IN
from mpbridge.training.certified import training_of

DATA = Path(__file__).resolve().parent / "data" / "certificates.json"
NVFP4 = Quant(format="e2m1", scaling="nvfp4")
QUARTET = "arXiv 2601.22813 (Quartet II), notebooks/unbiasedness.ipynb at 8776a90b"
HEADROOM = "its baseline maps block maxima to 6 * 16/17 (schemes/nvidia.py), which Transformer Engine does not"


def normal(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def error(side: Any, gemm: Any, variant: Variant | None = None, release: tuple[int, int] = (2, 17)) -> float:
    made = Operands(NVFP4, variant=variant, release=release)
    return 1e3 * operand_figures(made.expected(normal(1024, 2048).bfloat16(), gemm=gemm, side=side))["MSE"]


def four_over_six(square: bool) -> Variant:
    values = (("four_over_six", "weights"), ("four_over_six_error", "MSE"), ("square_weights", square))
    return Variant(name="4/6", words="", options=values)


@functools.cache
def errors(name: str | None, unbiased: bool) -> tuple[float, float]:
    """(squared error of the mean, of one draw around it) of the product of two matrices rounded stochastically, relative to it; unbiased: with infinitely many random bits, where headroom leaves no bias."""
    made = Operands(NVFP4, variant=None if name is None else VARIANTS[name])
    a, b = (made.expected(normal(1024, 1024, seed), gemm="dgrad", side="dy") for seed in (0, 1))
    product = a.source @ b.source.T
    first, second = (one.source if unbiased else one.mean for one in (a, b))
    bias = (first @ second.T - product).square().sum()
    noise = (a.variance @ (b.variance + second.square()).T).sum() + (first.square() @ b.variance.T).sum()
    return float(bias / product.square().sum()), float(noise / product.square().sum())


def averaged(count: int, name: str | None, *, unbiased: bool = False) -> float:
    """Bits of the mean of `count` products."""
    bias, noise = errors(name, unbiased)
    return bits(bias + noise / count)


@functools.cache
def eden_averaged() -> dict[int, float]:
    """Number of products averaged -> bits."""
    a, b, generator = normal(512, 512, 0), normal(512, 512, 1), torch.Generator().manual_seed(2)
    total, product = torch.zeros(512, 512, dtype=torch.float64), (a @ b.T).double()
    found = {}
    for count in range(1, 65):
        signs = torch.randint(0, 2, (128,), generator=generator).float() * 2 - 1
        total += ms_eden(a, generator, signs=signs, rotated=True) @ ms_eden(b, generator, signs=signs, rotated=True).T
        found[count] = bits(float((total / count - product).square().sum() / product.square().sum()))
    return found


def eden_error() -> float:
    x = normal(2048, 2048)
    return 1e3 * float((ms_eden(x, torch.Generator().manual_seed(1)) - x).square().sum() / x.square().sum())


def halving_scales() -> float:
    """Share of MXFP8 scales that fall on a second pass, counted over every amax mantissa of BF16 and their octave's logarithm."""
    made = Operands(Quant(format="e4m3", scaling="mxfp8"))
    x = torch.exp2((torch.arange(1 << 14) + 0.5) / (1 << 14)).repeat_interleave(32).view(-1, 32).float()
    first = made.expected(x, gemm="fprop", side="x")
    second = made.expected(first.mean.float(), gemm="fprop", side="x")
    return 100 * float((first.scale != second.scale).any(1).double().mean())


def reached(name: str, *, largest: bool) -> float:
    """The largest or smallest positive value that the quantizer's rounding gives over every FP32 exponent and 64 mantissas."""
    values = torch.exp2(torch.arange(-40, 40).float())[:, None] * (1 + torch.arange(64) / 64)
    found = round_nearest(values.flatten(), FORMATS[name])
    return float(found.max() if largest else found[found > 0].min())


def thousand(stochastic: bool) -> float:
    """0.001 added to 1.0 a thousand times in BF16; the mean of a thousand sums if stochastic."""
    total, generator = torch.ones(1000), torch.Generator().manual_seed(0)
    for _ in range(1000):
        raised = total + 0.001
        if stochastic:
            noise = torch.randint(0, 1 << 16, raised.shape, generator=generator, dtype=torch.int32)
            total = ((raised.view(torch.int32) + noise) & -65536).view(torch.float32)
        else:
            total = raised.bfloat16().float()
    return float(total.mean())


Claim = tuple[str, str, float, Callable[[], float], float, str]
"""Source, what, published, how ours is computed, relative tolerance (half a unit in the published last digit, or the sample's), why if it differs."""
CLAIMS: tuple[Claim, ...] = (
    (QUARTET, "MSE x 1e-3, NVFP4 of N(0,1), one scale per 16", 9.0, lambda: error("x", "fprop"), 0.01, ""),
    (QUARTET, "the same, one scale per 16 x 16", 12.4, lambda: error("w", "fprop"), 0.01, ""),
    (QUARTET, "the same, Four Over Six", 7.6, lambda: error("w", "fprop", four_over_six(False)), 0.01, ""),
    (QUARTET, "the same, Four Over Six, 16 x 16", 12.4, lambda: error("w", "fprop", four_over_six(True)), 0.01, ""),
    (QUARTET, "MSE x 1e-3, stochastic rounding, Transformer Engine's rule", 23.5, lambda: error("dy", "dgrad"), 0.01, HEADROOM),
    (QUARTET, "the same with 17/16 headroom", 23.5, lambda: error("dy", "dgrad", VARIANTS["headroom"]), 0.01, ""),
    (QUARTET, "bits of one stochastic product, Transformer Engine's rule", 2.197, lambda: averaged(1, None), 0.005, HEADROOM),
    (QUARTET, "bits of the mean of 1,024, Transformer Engine's rule", 7.196, lambda: averaged(1024, None), 0.005, "clipping leaves a plateau; " + HEADROOM),
    (QUARTET, "bits of one, headroom, infinitely many random bits", 2.197, lambda: averaged(1, "headroom", unbiased=True), 0.005, ""),
    (QUARTET, "bits of the mean of 1,024, the same", 7.196, lambda: averaged(1024, "headroom", unbiased=True), 0.005, ""),
    (QUARTET, "bits of the mean of 1,024, headroom, eight random bits", 7.196, lambda: averaged(1024, "headroom"), 0.005, "eight random bits, as Transformer Engine's rule takes, round down by 1/512 of a step on average"),
    (QUARTET, "MSE x 1e-3, MS-EDEN", 9.8, eden_error, 0.01, ""),
    (QUARTET, "MS-EDEN, a linear's input gradient, bits of 1", 2.847, lambda: eden_averaged()[1], 0.01, ""),
    (QUARTET, "of the mean of 4", 3.839, lambda: eden_averaged()[4], 0.01, ""),
    (QUARTET, "of 16", 4.843, lambda: eden_averaged()[16], 0.01, ""),
    (QUARTET, "of 64", 5.840, lambda: eden_averaged()[64], 0.01, ""),
    ("NVIDIA/Megatron-LM#6666", "percent of MXFP8 scales that fall on a second pass", 5.08, halving_scales, 0.01, ""),
    ("NVIDIA/Megatron-LM#6666", "the same by log2(29/28)", 5.08, lambda: 100 * second_pass(E4M3).share, 0.01, ""),
    ("arXiv 2209.05433, table 1", "largest E4M3", 448.0, lambda: reached("e4m3", largest=True), 0.0, ""),
    ("arXiv 2209.05433, table 1", "largest E5M2", 57344.0, lambda: reached("e5m2", largest=True), 0.0, ""),
    ("arXiv 2209.05433, table 1", "smallest E4M3", 2.0**-9, lambda: reached("e4m3", largest=False), 0.0, ""),
    ("arXiv 2209.05433, table 1", "smallest E5M2", 2.0**-16, lambda: reached("e5m2", largest=False), 0.0, ""),
    ("OCP Microscaling Formats v1.0", "largest E2M1", 6.0, lambda: reached("e2m1", largest=True), 0.0, ""),
    ("arXiv 2506.08027 (MXFP8)", "binades of E4M3", 17.8, lambda: math.log2(reached("e4m3", largest=True) / reached("e4m3", largest=False)), 0.003, ""),
    ("arXiv 1710.03740, section 3.1", "weight / update from which FP16 loses it", 2048.0, lambda: 1 / half_gap(0, DType.FP16), 0.0, ""),
    ("arXiv 2512.02010 (Four Over Six), J. Huang's notes", "percent error of a block's value of 4.62", 13.4, lambda: 100 * (4.62 - float(round_nearest(torch.tensor(4.62), FORMATS["e2m1"]))) / 4.62, 0.004, ""),
    ("HeavyBall, Bias compounds, variance washes out", "0.001 added to 1.0 a thousand times in BF16, to nearest", 1.0, lambda: thousand(stochastic=False), 0.0, ""),
    ("HeavyBall, Bias compounds, variance washes out", "the same, stochastically", 2.0, lambda: thousand(stochastic=True), 0.01, ""),
    ("arXiv 2510.26788", "BF16's mismatch of log-probabilities over FP16's: three mantissa bits", 8.0, lambda: sum(mismatch(torch.bfloat16, s) for s in range(8)) / sum(mismatch(torch.float16, s) for s in range(8)), 0.125, ""),
    ("fastai, 004b_mixed_precision", "the number after 1 in FP16", 1.0009765625, lambda: 1 + 2 * half_gap(0, DType.FP16), 0.0, ""),
)  # fmt: skip


def published() -> list[dict[str, Any]]:
    rows = []
    for source, what, value, ours, tolerance, why in CLAIMS:
        found = ours()
        agrees = abs(found - value) <= tolerance * value
        rows.append({"source": source, "what": what, "published": value, "ours": found, "agrees": agrees, "why": why})
        print(f"{what}: published {value:g}, ours {found:.5g}{'' if agrees else ' DIFFERS'}", flush=True)
    return rows


def figure(made: Certificate, where: str, quantity: str, kind: str) -> list[float] | None:
    """[value, half of its 95 % interval]"""
    rows = (r for r in made.rows if (r.where, r.quantity, r.tensor) == (where, quantity, kind))
    return next(([r.value, r.ci95 or 0.0] for r in rows), None)


def certified(name: str, variant: str | None = None) -> dict[str, Any]:
    box = ConfigContainer.load("gpt_tiny", ["model.num_layers=16", f"mixed_precision.recipe={name}"], check=False)
    run = box.resolved(box.smallest_world())
    made = certificate(
        name, run.policy, training_of(run, whole=True), variant=None if variant is None else VARIANTS[variant]
    )
    kinds = ("normal", "student-3", "lognormal", "sparse")
    row: dict[str, Any] = {
        "recipe": name,
        "variant": variant,
        "seconds": round(made.seconds, 1),
        "sentence": made.sentences["recipe"],
    }
    for gemm in ("fprop", "dgrad", "wgrad"):
        row[gemm] = [made.value(gemm, "one step bits"), made.value(gemm, "plateau bits")]
    row["fresh"] = figure(made, "wgrad", "alignment over fresh data", "normal")
    for quantity in ("MSE", "alignment", "small-signal gain"):
        row[quantity] = [figure(made, "dgrad dy row", quantity, kind) for kind in kinds]
    print(f"{name} {variant or ''}: {made.seconds:.1f} s; {made.sentences['recipe']}", flush=True)
    return json.loads(json.dumps(row).replace("Infinity", "null"))  # type: ignore[no-any-return]


def main() -> None:
    import warnings

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    base = "bf16_with_nvfp4_mixed"
    if names := sys.argv[1:]:
        data = json.loads(DATA.read_text(encoding="utf-8"))
        known = {r["recipe"]: r for r in data["recipes"]}
        data["recipes"] = [certified(r.name) if r.name in names else known[r.name] for r in BUILT_IN]
        data["variants"] = [certified(base, r["variant"]) if r["variant"] in names else r for r in data["variants"]]
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        return
    data = {
        "published": published(),
        "recipes": [certified(recipe.name) for recipe in BUILT_IN],
        "variants": [certified(base, name) for name in (None, *VARIANTS)],
    }
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
