"""What is recommended, from figures made by hand."""

from __future__ import annotations

import pytest

from mpbridge.training.tune.proof import GradientError, judged

LOW, HIGH = (0.10, 0.11, 0.12), (0.30, 0.31, 0.30)


@pytest.mark.parametrize(
    ("arms", "same", "take", "says"),
    [
        ({"tuned": (1.5, *LOW), "last 15 % bf16": (1.5, *HIGH), "all low": (1.0, *HIGH)}, (), "tuned", "better than last 15 % bf16"),
        ({"tuned": (1.5, 0.1, 0.3, 0.11), "whole kinds": (1.4, 0.2, 0.2, 0.2)}, (), "whole kinds", "no better than whole kinds: take that"),
        ({"tuned": (1.5, *LOW), "all mxfp8": (2.0, 0.05, 0.06, 0.055)}, (), "tuned", "all mxfp8 costs 1.33 times as much and is off by 0.055"),
        ({"tuned": (1.5, *LOW), "whole kinds": (1.5, *LOW)}, ("whole kinds",), "tuned", "the choice is whole kinds itself"),
        ({"tuned": (1.5, *LOW), "random 1": (1.5, *HIGH)}, (), "tuned", "1 random choice at the same cost"),
        ({"tuned": (2.5, *LOW), "random 1": (1.8, 0.2, 0.2, 0.2), "random 2": (2.0, 0.2, 0.2, 0.2)}, (), "tuned", "2 random choices at 0.72 to 0.80 times its cost: off by 0.200 on average, 0.200 the best of them"),
        ({"tuned": (1.5, *LOW), "random 1": (1.5, *HIGH), "random 2": (1.5, 0.09, 0.09, 0.09)}, (), "tuned", "0.090 the best of them, below tuned's 0.110"),
    ],
)  # fmt: skip
def test_the_best_within_two_standard_errors_at_no_higher_cost_is_taken(
    arms: dict[str, tuple[float, ...]], same: tuple[str, ...], take: str, says: str
) -> None:
    """arms: name -> cost, errors of three batches. same: rules whose choice is the proposal itself."""
    proof = {name: GradientError(errors=list(errors), gaps=[0.0] * 3) for name, (_, *errors) in arms.items()}
    found = judged(proof, {name: cost for name, (cost, *_) in arms.items()}, {name: name in same for name in arms})
    assert found.take == take
    assert says in " ".join(found.lines)


def test_noise_above_the_yardstick_names_the_batch_that_averages_it_below() -> None:
    noisy = GradientError(errors=[1.2, 1.2], gaps=[0.0, 0.0], bias=0.1, noise=1.1)
    said = " ".join(judged({"tuned": noisy}, {"tuned": 1.0}, {}).lines)
    assert "is above the yardstick 0.577" in said
    # (1.1 x sqrt 3)^2 = 3.63
    assert "4 times as large" in said
