"""Schedules of recipes: what authors may write, and where the switches fall."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mpbridge.common.errors import BadValue, Contradiction
from mpbridge.precision.schedule import Mark, spans


@pytest.mark.parametrize(("text", "step"), [
    pytest.param("90%", 180, id="percent"), pytest.param("12.5 percent", 25, id="fraction of a percent"),
    pytest.param(120, 120, id="steps"), pytest.param("120 steps", 120, id="steps in words"),
    pytest.param("1024 tokens", 2, id="tokens"), pytest.param("1025 tokens", 3, id="tokens reached inside a step"),
    pytest.param("1k tokens", 2, id="multiples"), pytest.param({"tokens": 1e3}, 2, id="mapping"),
])  # fmt: skip
def test_marks_name_a_step(text, step):
    assert Mark.parse(text).step(steps=200, tokens_per_step=512) == step


@pytest.mark.parametrize("text", ["", "soon", "0%", "100%", "-3", "2.5", True, "1.5 steps", {"a": 1, "b": 2}, None])
def test_what_is_no_place_is_refused(text):
    with pytest.raises(BadValue, match="until"):
        Mark.parse(text)


@dataclass
class Part:
    recipe: str
    until: object = None


def test_spans_cover_the_run_and_hold_each_step_once():
    found = spans([Part("nvfp4", "25%"), Part("fp8_cs", 90), Part("bf16")], steps=100, tokens_per_step=1)
    parts = [(0, 25, "nvfp4"), (25, 90, "fp8_cs"), (90, 100, "bf16")]
    assert [(s.start, s.stop, s.stage.recipe) for s in found] == parts
    assert [sum(s.holds(done) for s in found) for done in range(100)] == [1] * 100


@pytest.mark.parametrize(("marks", "said"), [
    pytest.param([50, 40, None], "later `until`", id="backwards"),
    pytest.param([101, None], "after the run's last step", id="behind the end"),
    pytest.param([100, None], "later `until`", id="nothing left for the last"),
    pytest.param(["soon", None], "not a valid stage end", id="no place"),
])  # fmt: skip
def test_stages_that_do_not_fit_the_run_are_refused(marks, said):
    with pytest.raises(Contradiction, match=said):
        spans([Part("bf16_mixed", mark) for mark in marks], steps=100, tokens_per_step=1)


def test_every_fault_is_named_at_once():
    with pytest.raises(Contradiction) as told:
        spans([Part("a", "soon"), Part("b", 200), Part("c", 1), Part("d")], steps=100, tokens_per_step=1)
    assert len(told.value.faults) == 4  # the last stage has nothing left either
