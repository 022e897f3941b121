"""Statistics of operands: known damages are seen, known harmless things are not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mpbridge.numerics import emulate_linears
from mpbridge.numerics.operands import COPY_OF
from mpbridge.numerics.statistics import BINS, Sample, Statistics, look
from tests.numerics.conftest import quant_of, quantizer_of
from tests.numerics.test_linear import data, gradients, model, policy


def sample(x: torch.Tensor, scaling: str, side: str = "x", copy: str = "row", **fields: Any) -> Sample:
    quantizer = quantizer_of(quant_of(scaling, **fields))
    gemm = next(gemm for (gemm, s), c in COPY_OF.items() if s == side and c == copy)
    which: Any = {"gemm": gemm, "side": side}
    return look(x, quantizer.operand(x, slot="fc", **which), quantizer, **which)


def normal(rows: int = 128, columns: int = 256) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).bfloat16()


EXPECTED = {"tensorwise": 0.0263, "blockwise": 0.0263, "mxfp8": 0.0263, "nvfp4": 0.095}
"""Median row error of N(0,1): the rounding error of the format itself; measured, see the verdicts' thresholds."""


@pytest.mark.parametrize("copy", ["row", "column"])
@pytest.mark.parametrize("scaling", list(EXPECTED))
def test_gaussian_data_shows_the_formats_own_error_in_both_copies(scaling: str, copy: str) -> None:
    found = sample(normal(), scaling, copy=copy)
    assert found.row_error == pytest.approx(EXPECTED[scaling], rel=0.12)
    assert found.relative_error == pytest.approx(EXPECTED[scaling], rel=0.12)
    assert found.sqnr == pytest.approx(-20 * math.log10(found.relative_error))
    assert found.saturated < (0.001 if scaling != "nvfp4" else 0.05)
    assert found.flushed < (0.001 if scaling != "nvfp4" else 0.12)
    assert found.nonfinite == 0


def test_an_outlier_ruins_rows_that_the_frobenius_norm_hides() -> None:
    x = normal() * 1e-3
    x[0, 0] = 3e4
    tensor, blocks = sample(x, "tensorwise"), sample(x, "mxfp8")
    assert tensor.relative_error < 0.001
    assert tensor.row_error == pytest.approx(1.0)
    assert tensor.flushed > 0.99
    assert blocks.row_error == pytest.approx(EXPECTED["mxfp8"], rel=0.12)
    assert blocks.flushed < 0.01
    low, _ = BINS
    assert sum(tensor.ranges[: -9 - low]) == 127  # all rows but one lie below the smallest code of E4M3
    assert sum(blocks.ranges[: -9 - low]) == 0


def test_saturation_staleness_and_nonfinite_elements_are_counted() -> None:
    fresh = sample(torch.full((8, 16), 3.5).bfloat16(), "delayed")
    assert fresh.saturated == 0
    assert fresh.staleness == pytest.approx(7.0)
    stale = sample(torch.full((8, 16), 896.0).bfloat16(), "delayed")
    assert stale.saturated == 1.0
    assert stale.staleness == pytest.approx(-1.0)
    assert stale.row_error == pytest.approx(0.5)
    vanishing = sample(torch.full((8, 16), 1e-42), "delayed")
    assert vanishing.staleness == pytest.approx(128.0, abs=1e-3)
    x = normal()
    x[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    assert sample(x, "tensorwise").nonfinite == 3
    assert sample(x, "tensorwise").amax == math.inf
    tall = normal(4096)
    tall[1, 5] = math.nan  # of 4096 rows a few hundred are looked at, not this one
    assert sample(tall, "tensorwise").nonfinite == 1


def test_zero_tensors_have_no_error() -> None:
    found = sample(torch.zeros(32, 64, dtype=torch.bfloat16), "mxfp8")
    assert (found.relative_error, found.row_error, found.flushed, found.saturated) == (0.0, 0.0, 0.0, 0.0)
    assert sum(found.ranges) == 0


@pytest.mark.parametrize("scaling", ["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"])
def test_a_step_is_sampled_once_and_others_are_left_out(scaling: str) -> None:
    net = model()
    emulation = emulate_linears(net, policy(scaling), compiled=False)
    emulation.observer = statistics = Statistics(every=2)
    before = None
    for number in range(1, 5):
        statistics.step(number)
        emulation.step_begin()
        for _ in range(2):
            result = gradients(net, data())
        before = result
    found = {(row["tensor"], row["copy"]): row for row in statistics.summary()}
    copies = 1 if scaling in ("delayed", "tensorwise") else 2
    weights = copies if scaling == "mxfp8" else 1
    assert len(found) == 2 * (2 * copies + weights)
    assert all([step for step, _ in row["amax"]] == [1, 3] for row in found.values())
    gemms = [gemm for (name, _), row in found.items() if name == "0.x" for gemm in row["gemms"]]
    assert sorted(gemms) == ["fprop", "wgrad"]
    assert before is not None


def test_looking_changes_no_number() -> None:
    results = []
    for looks in (False, True):
        net = model()
        emulation = emulate_linears(net, policy("delayed"), compiled=False)
        emulation.observer = Statistics() if looks else None
        for _ in range(3):
            emulation.step_begin()
            result = gradients(net, data())
        results.append(result)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
