"""What the curves and events of a run tell without statistics: healthy noise, switches and starts, and runs that train nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpbridge.observe.diagnose.diagnosis import Diagnosis, diagnose

Told = Callable[..., Diagnosis]


@pytest.fixture
def told(tmp_path: Path) -> Told:
    """The diagnosis of a run with these rows and events."""

    def diagnosed(rows: list[dict[str, Any]], events: list[dict[str, Any]] | None = None) -> Diagnosis:
        for name, lines in (("metrics.jsonl", rows), ("events.jsonl", events or [])):
            (tmp_path / name).write_text("".join(json.dumps(one) + "\n" for one in lines))
        return diagnose(tmp_path)

    return diagnosed


def step(i: int, loss: float, **other: Any) -> dict[str, Any]:
    return {"iteration": i, "loss": loss, "grad_norm": 1.0, "lr": 1e-3, "loss_scale": 1.0, "applied": True} | other


def noisy(seed: int, noise: float, *, steps: int = 200, rise: float = 0.0) -> list[dict[str, Any]]:
    """A run that learns nothing more; from the middle on its loss rises by so much in all."""
    drawn, half = random.Random(seed), steps // 2
    return [step(i, 2.5 + rise * max(0, i - half) / half + drawn.gauss(0, noise)) for i in range(1, steps + 1)]


def scaled(scales: list[tuple[float, bool]]) -> list[dict[str, Any]]:
    """Steps with these loss scales, each with whether its update was made."""
    return [step(i, 5 - 0.01 * i, loss_scale=scale, applied=made) for i, (scale, made) in enumerate(scales, start=1)]


SEARCH = [(2.0 ** (32 - i), False) for i in range(17)]
"""FP16's start: a loss scale of 2**32 that overflows until it is 2**15."""


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.15, 0.5])
def test_noise_is_no_rise_and_no_spike(told: Told, noise: float) -> None:
    for seed in range(8):
        found = told(noisy(seed, noise))
        assert found.healthy, (seed, found.verdict)
    assert told(noisy(0, noise, steps=3000)).healthy


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.15])
def test_a_slow_rise_above_the_noise_is_told_and_is_no_spike_of_the_data(told: Told, noise: float) -> None:
    for seed in range(4):
        found = told(noisy(seed, noise, rise=1.5))
        assert [one.number for one in found.onsets] == ["loss"], (seed, found.verdict)
        assert found.suspects == []


def test_an_explosion_in_the_first_steps_is_told(told: Told) -> None:
    losses = [10.0, 9.0, 14.0, *[40.0] * 57]
    found = told([step(i, loss) for i, loss in enumerate(losses, start=1)])
    assert [(one.step, one.number) for one in found.onsets] == [(4, "loss")]
    assert told([step(i, loss) for i, loss in enumerate([6.0, 5.0, 11.0, *[4.0] * 57], start=1)]).healthy


def test_a_gradient_norm_that_grows_in_small_steps_is_told(told: Told) -> None:
    def grown(factor: float) -> Diagnosis:
        return told([step(i, 3 - 0.001 * i, grad_norm=factor**i) for i in range(1, 361)])

    (onset,) = grown(1.02).onsets
    assert onset.number == "grad_norm"
    assert onset.value > 900 * onset.usual
    assert grown(1.01).healthy, "36-fold: weights and norms grow in healthy runs too"


def test_a_change_of_recipe_explains_a_leap_of_the_loss_scale(told: Told) -> None:
    event = {"iteration": 15, "event": "recipe", "before": "fp16_mixed", "after": "bf16_mixed", "text": "a -> b"}
    fp16, bf16 = [(4096.0, True)] * 15, [(1.0, True)] * 15
    for rows in (fp16 + bf16, bf16 + [(65536.0, True)] * 15, bf16[:5] + SEARCH + [(2.0**15, True)] * 9):
        event["iteration"] = 5 if rows[5][1] is False else 15
        assert told(scaled(rows), [event]).healthy
        # without the event nothing explains it
        assert [one.cause for one in told(scaled(rows)).suspects] == ["loss-scale"]
    # what goes wrong under the new recipe is not excused
    found = told(scaled(bf16 + [(4096.0, True)] * 15 + [(2.0**-20, True)] * 15), [event | {"iteration": 15}])
    assert [(one.cause, one.step) for one in found.suspects] == [("loss-scale", 31)]


def test_a_resume_explains_a_leap_of_the_loss_scale_only_where_it_has_another(told: Told) -> None:
    event: dict[str, Any] = {"iteration": 15, "event": "resumed", "text": "resumed from step_15: same"}
    assert told(scaled([(1.0, True)] * 15 + [(65536.0, True)] * 15), [event]).healthy
    rows = scaled([(4096.0, True)] * 15 + [(2.0**30, True)] * 15)
    assert [one.cause for one in told(rows, [event]).suspects] == ["loss-scale"]
    assert told(rows, [event | {"optimizer_reset": True}]).healthy


@pytest.mark.parametrize("later", [0, 1, 3, 13, 60])
def test_the_first_overflows_from_a_high_loss_scale_are_expected(told: Told, later: int) -> None:
    assert told(scaled(SEARCH + [(2.0**15, True)] * later)).healthy


def test_a_loss_scale_that_never_fits_is_told(told: Told) -> None:
    falls = scaled([(max(1.0, 2.0 ** (32 - i)), False) for i in range(60)])
    assert told(falls).suspects[0].cause == "loss-scale"
    constant = scaled([(2.0**20, False)] * 30)
    assert told(constant).suspects[0].cause == "loss-scale"
    late = scaled([*SEARCH, (2.0**14, True), *((2.0**14, False) for _ in range(12))])
    assert told(late).suspects[0].cause == "loss-scale"


def test_a_spike_on_tokens_that_the_run_calls_unlike_is_not_a_resumes_or_a_recipes(told: Told) -> None:
    for before, at in (({"event": "resumed", "text": "resumed from step_20: same"}, 22), ({"event": "recipe", "after": "x", "text": "a -> x"}, 29)):  # fmt: skip
        rows = [step(i, 5 - 0.01 * i + 3 * (i == at), grad_norm=1 + 20 * (i == at)) for i in range(1, 61)]
        tokens = {"iteration": at, "event": "tokens", "text": "the tokens of that step are unlike those before"}
        found = told(rows, [{"iteration": 20, **before}, tokens])
        assert [(one.cause, one.step) for one in found.suspects] == [("data-spike", at)]
        assert found.suspects[0].score > 0.9
        # without that event, or with one that is long past, the resume or the recipe is
        for events in ([], [tokens | {"iteration": 12}]):
            assert told(rows, [{"iteration": 20, **before}, *events]).suspects[0].cause in ("bad-resume", "recipe-switch")  # fmt: skip


IDLE = {"skipped": {"applied": False}, "gradient norm": {"grad_norm": 0.0}, "rate": {"lr": 0.0}}


@pytest.mark.parametrize("reason", IDLE)
def test_a_run_that_trains_nothing_is_told_why(told: Told, reason: str) -> None:
    def idle(begin: int, end: int = 100) -> Diagnosis:
        return told([step(i, 5.0, **(IDLE[reason] if begin <= i <= end else {})) for i in range(1, 101)])

    for begin in (1, 61):
        (suspect,) = idle(begin).suspects
        assert (suspect.cause, suspect.step) == ("no-update", begin)
        assert reason in suspect.sentence
    assert idle(81).healthy, "a schedule may end at zero"
    assert "no-update" not in [one.cause for one in idle(1, 50).suspects]


def test_the_first_overflows_hold_the_rate_at_its_beginning(told: Told) -> None:
    rows = scaled([*SEARCH, (2.0**15, True)])
    for row in rows:
        row["lr"] = 0.0
    assert told(rows).healthy


def test_updates_skipped_over_nan_are_the_nans(told: Told) -> None:
    rows = [step(i, float("nan"), applied=False, nonfinite_steps=i) for i in range(1, 61)]
    found = told(rows)
    assert not found.healthy
    assert "no-update" not in [one.cause for one in found.suspects]
