"""Schedules of recipes: what authors may write, and where the switches fall."""

from __future__ import annotations

import pytest

from mpbridge.errors import BadValue, Contradiction
from mpbridge.precision.schedule import Mark, Schedule


@pytest.mark.parametrize(
    ("text", "step"),
    [
        pytest.param("90%", 180, id="percent"),
        pytest.param("12.5 percent", 25, id="fraction of a percent"),
        pytest.param(120, 120, id="steps"),
        pytest.param("120 steps", 120, id="steps in words"),
        pytest.param("1024 tokens", 2, id="tokens"),
        pytest.param("1025 tokens", 3, id="tokens reached inside a step"),
        pytest.param("1k tokens", 2, id="multiples"),
        pytest.param({"tokens": 1e3}, 2, id="mapping"),
    ],
)
def test_marks_name_a_step(text, step):
    assert Mark.parse(text).step(steps=200, tokens_per_step=512) == step


@pytest.mark.parametrize("text", ["", "soon", "0%", "100%", "-3", "2.5", True, "1.5 steps", {"a": 1, "b": 2}, None])
def test_what_is_no_place_is_refused(text):
    with pytest.raises(BadValue, match="until"):
        Mark.parse(text)


def test_spans_cover_the_run_and_hold_each_step_once():
    schedule = Schedule.parse([{"recipe": "nvfp4", "until": "25%"}, {"recipe": "fp8_cs", "until": 90}, "bf16"])
    spans = schedule.spans(steps=100, tokens_per_step=1)
    assert [(s.start, s.stop, s.stage.recipe) for s in spans] == [(0, 25, "nvfp4"), (25, 90, "fp8_cs"), (90, 100, "bf16")]
    assert [sum(s.holds(done) for s in spans) for done in range(100)] == [1] * 100


def test_further_keys_change_the_recipe():
    schedule = Schedule.parse([{"recipe": "bf16_mixed", "grad_reduce_in_fp32": False, "until": 3}, {"recipe": "bf16_mixed"}])
    assert [stage.config.grad_reduce_in_fp32 for stage in schedule.stages] == [False, True]


def test_every_fault_is_named_at_once():
    with pytest.raises(Contradiction) as told:
        Schedule.parse([{"recipe": "bf16_mixd", "until": 3}, {"recipe": "bf16_mixed"}, {"until": 3}, {"recipe": "fp32", "until": 9}])
    text = str(told.value)
    assert "bf16_mixed" in text
    assert len(told.value.faults) == 4
    assert [f"stage {n}:" in text for n in (1, 2, 3, 4)] == [True] * 4


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        pytest.param([{"recipe": "nvfp4", "until": 50}, {"recipe": "fp8_cs", "until": 40}, "bf16"], "later `until`", id="backwards"),
        pytest.param([{"recipe": "nvfp4", "until": 101}, "bf16"], "behind the run's last step", id="behind the end"),
        pytest.param([{"recipe": "nvfp4", "until": 100}, "bf16"], "later `until`", id="nothing left for the last"),
    ],
)
def test_stages_that_do_not_fit_the_run_are_refused(entries, said):
    with pytest.raises(Contradiction, match=said):
        Schedule.parse(entries).spans(steps=100, tokens_per_step=1)


@pytest.mark.parametrize("entries", ["bf16_mixed", [], None, {"recipe": "bf16_mixed"}])
def test_only_a_list_is_a_schedule(entries):
    with pytest.raises(BadValue, match="list"):
        Schedule.parse(entries)
