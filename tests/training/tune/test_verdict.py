"""What is recommended, from figures made by hand."""

from __future__ import annotations

from mpbridge.training.tune.proof import GradientError
from mpbridge.training.tune.verdict import judged


def arm(*errors: float) -> GradientError:
    return GradientError(errors=list(errors), gaps=[0.0] * len(errors), bias=0.1, noise=0.2)


def judge(proof: dict[str, GradientError], spent: dict[str, float], same: tuple[str, ...] = ()) -> tuple[str, str]:
    found = judged(proof, spent, {name: name in same for name in proof})
    return found.take, " ".join(found.lines)


def test_a_choice_that_beats_every_rule_of_its_cost_is_recommended() -> None:
    proof = {"tuned": arm(0.10, 0.11, 0.12), "last 15 % bf16": arm(0.20, 0.21, 0.23), "all low": arm(0.3, 0.3, 0.3)}
    take, said = judge(proof, {"tuned": 1.5, "last 15 % bf16": 1.5, "all low": 1.0})
    assert take == "tuned"
    assert "better than last 15 % bf16" in said


def test_a_rule_within_two_standard_errors_is_taken_instead() -> None:
    proof = {"tuned": arm(0.10, 0.30, 0.11), "whole kinds": arm(0.20, 0.20, 0.20)}
    take, said = judge(proof, {"tuned": 1.5, "whole kinds": 1.4})
    assert take == "whole kinds"
    assert "no better than whole kinds: take that" in said


def test_a_rule_that_costs_more_is_named_and_not_compared() -> None:
    proof = {"tuned": arm(0.10, 0.11), "all low": arm(0.3, 0.31), "all mxfp8": arm(0.05, 0.06)}
    take, said = judge(proof, {"tuned": 1.5, "all low": 1.0, "all mxfp8": 2.0})
    assert take == "tuned"
    assert "all mxfp8 costs 1.33 times as much and is off by 0.055" in said


def test_a_choice_that_is_a_rule_says_so() -> None:
    proof = {"tuned": arm(0.10, 0.11), "whole kinds": arm(0.10, 0.11), "random 1": arm(0.2, 0.2)}
    take, said = judge(proof, dict.fromkeys(proof, 1.5), same=("tuned", "whole kinds"))
    assert take == "tuned"
    assert "the choice is whole kinds itself" in said
    assert "random choice at the same cost" in said


def test_the_costs_of_random_choices_are_said_where_they_differ() -> None:
    proof = {"tuned": arm(0.10, 0.11), "random 1": arm(0.2, 0.2), "random 2": arm(0.2, 0.2)}
    _, said = judge(proof, {"tuned": 2.5, "random 1": 1.8, "random 2": 2.0})
    assert "2 random choices at 0.72 to 0.80 times its cost: off by 0.200" in said


def test_noise_above_the_yardstick_names_the_batch_that_averages_it_below() -> None:
    noisy = GradientError(errors=[1.2, 1.2], gaps=[0.0, 0.0], bias=0.1, noise=1.1)
    _, said = judge({"tuned": noisy}, {"tuned": 1.0})
    assert "is above the yardstick 0.577" in said
    # (1.1 x sqrt 3)^2 = 3.63
    assert "4 times as large" in said
