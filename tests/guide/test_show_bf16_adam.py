"""The guide's numbers: what the script prints is what the page says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.forked import ROOT
from tests.scripts import loaded


@pytest.fixture(scope="module")
def script() -> Any:
    return loaded("evidence/show_bf16_adam")


@pytest.mark.parametrize(
    ("beta2", "fp32", "bf16"),
    [(0.95, 1.0, 0.9805), (0.99, 1.0, 0.9805), (0.999, 0.9503, 0.5)],
)
def test_g3_a_second_moment_in_bf16_stalls(script: Any, beta2: float, fp32: float, bf16: float) -> None:
    assert script.second_moment(torch.float32, beta2=beta2) == pytest.approx(fp32, abs=1e-4)
    assert script.second_moment(torch.bfloat16, beta2=beta2) == pytest.approx(bf16, abs=1e-4)


def test_g4_small_updates_are_lost_in_bf16(script: Any) -> None:
    assert script.trained_weight(torch.float32) == pytest.approx(0.940002, abs=1e-6)
    assert script.trained_weight(torch.bfloat16) == 1.0
    assert script.lost_updates(torch.float32, 1e-3) == 0.0
    assert script.lost_updates(torch.bfloat16, 1e-3) == 1.0
    assert 0 < script.lost_updates(torch.bfloat16, 3e-3) < 1


def test_the_page_quotes_what_the_script_prints(script: Any) -> None:
    page = (ROOT / "docs" / "storage_and_compute.md").read_text()
    for what, fp32, bf16 in script.numbers():
        assert f"| {what} | {fp32} | {bf16} |" in page, (
            "docs/storage_and_compute.md: run scripts/evidence/show_bf16_adam.py again"
        )


def test_t7_mixed_stays_with_fp32_and_full_bf16_does_not(script: Any) -> None:
    # one seed and thirty-two steps separate them; the page shows three seeds of two hundred
    last = {recipe: sum(script.curve(recipe, seed=1, steps=32, lr=1e-3)[-10:]) / 10 for recipe in script.RECIPES}
    assert abs(last["bf16_mixed"] / last["fp32"] - 1) < 0.01
    assert last["full_bf16"] / last["fp32"] - 1 > 0.02


@pytest.mark.slow
def test_t7_three_seeds_of_two_hundred_steps(script: Any) -> None:
    last = script.train(200, 3, 1e-3)["last"]
    assert abs(last["bf16_mixed"] / last["fp32"] - 1) < 0.01
    assert last["full_bf16"] / last["fp32"] - 1 > 0.08
