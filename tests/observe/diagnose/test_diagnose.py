"""Causes from files alone: each with runs written by hand, beside neighbours in which it is not the cause, and files in any state."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mpbridge.cli.main import main
from mpbridge.common.errors import BadValue
from mpbridge.observe.diagnose.diagnosis import Diagnosis, diagnose
from mpbridge.observe.diagnose.evidence import gather
from mpbridge.observe.diagnose.page import diagnosis_page, precision_page
from mpbridge.observe.telemetry import records
from mpbridge.observe.telemetry.records import FILE, LINEARS, OPERANDS, WEIGHTS, line

STEPS = 60
LAYERS = [f"decoder.layers.{i}.mlp.linear_fc{j}" for i in (0, 1) for j in (1, 2)]


class Written:
    """A healthy run's files, which a test then changes."""

    def __init__(self, folder: Path, *, every: int = 5) -> None:
        self.folder = folder
        self.rows: list[dict[str, Any]] = [
            {"iteration": i, "loss": 2.0 + 3.0 * math.exp(-i / 10) + 0.01 * (i * 7 % 5), "grad_norm": 1.0 + 0.05 * (i * 3 % 7), "lr": 1e-3, "loss_scale": 1.0, "applied": True, "skipped_steps": 0, "nonfinite_steps": 0, "consumed_samples": 8 * i, "tokens_per_second": 100.0}
            for i in range(1, STEPS + 1)
        ]  # fmt: skip
        self.operands: dict[tuple[int, str, str], dict[str, Any]] = {}
        self.linears: dict[tuple[int, str], dict[str, Any]] = {}
        self.weights: dict[tuple[int, str], dict[str, Any]] = {}
        self.steps = list(range(every, STEPS + 1, every))
        for step in self.steps:
            for name in LAYERS:
                for side in ("x", "w", "dy"):
                    # scales follow amaxes that wander
                    amax = 2.0 + 0.1 * (step % 3)
                    self.operands[step, name, side] = {
                        "linear": name, "side": side, "copy": "row", "gemms": "fprop", "format": "e4m3", "scaling": "delayed", "flushed": 0.0, "saturated": 0.0,
                        "amax": amax, "scale": 448 / 2.2, "staleness": math.log2(2.2 / amax), "sqnr": 31.0, "row_error": 0.026, "nonfinite": 0,
                    }  # fmt: skip
                self.linears[step, name] = {"linear": name, "x_amax": 2.0, "x_rms": 0.5, "x_outlier": 2.0, "x_channel": 3, "dy_amax": 1e-3, "dy_rms": 1e-4, "nonfinite": 0, "grad_to_noise": 20.0}  # fmt: skip
                self.weights[step, f"{name}.weight"] = {"parameter": f"{name}.weight", "rms": 0.02 + 0.0002 * step, "amax": 0.1, "nonfinite": 0, "main_gap": 0.0, "exp_avg_rms": 1e-3, "exp_avg_sq_mean": 1e-6}  # fmt: skip
            name = "decoder.layers.1.input_layernorm.weight"
            self.weights[step, name] = {"parameter": name, "rms": 1.0, "amax": 1.1, "nonfinite": 0, "main_gap": 0.0, "exp_avg_rms": 1e-3, "exp_avg_sq_mean": 1e-6}  # fmt: skip
        self.events: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.audited: dict[str, list[str]] = {}
        self.config: dict[str, Any] = {}

    def loss(self, steps: range, by: float) -> None:
        for row in self.rows:
            if row["iteration"] in steps:
                row["loss"] += by

    def change(self, table: str, begin: int, names: Sequence[Any], values: dict[str, Any]) -> None:
        """Changes rows from a step on. names: linears, parameters with or without '.weight', or (linear, side)."""
        wanted = {one.removesuffix(".weight") if isinstance(one, str) else one for one in names}
        for (step, name, *side), row in getattr(self, table).items():
            if step >= begin and ((name, *side) if side else name.removesuffix(".weight")) in wanted:
                row |= values

    def write(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        plain = [{k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()} for row in self.rows]  # fmt: skip
        (self.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain))
        lines = []
        for step in self.steps:
            tables = {}
            for name, columns, kept in (("operands", OPERANDS, self.operands), ("linears", LINEARS, self.linears), ("weights", WEIGHTS, self.weights)):  # fmt: skip
                tables[name] = [[row.get(column) for column in columns] for key, row in kept.items() if key[0] == step]  # type: ignore[index]
            lines.append(line({"iteration": step, "realization": "emulated", "recipe": "r", **self.facts}, tables))
        (self.folder / FILE).write_text("".join(lines))
        if self.events:
            (self.folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in self.events))
        audits = [{"step": 1, "ok": True, "facts": self.audited}]
        precision = {"recipe": "r", "audit": {"history": audits}, "config": self.config}
        (self.folder / "precision.json").write_text(json.dumps(precision))
        return self.folder

    def diagnosed(self) -> Diagnosis:
        return diagnose(self.write())


@pytest.fixture
def run(tmp_path: Path) -> Written:
    return Written(tmp_path / "run")


def first(found: Diagnosis) -> str | None:
    return found.suspects[0].cause if found.suspects else None


def test_a_healthy_run_is_accused_of_nothing(run: Written) -> None:
    found = run.diagnosed()
    assert (found.healthy, found.suspects, found.onsets, found.run.gaps) == (True, [], [], [])


Act = Callable[[Written], Any]


def loss(first: int, stop: int, by: float = 2.0) -> Act:
    return lambda run: run.loss(range(first, stop), by)


def rows(first: int, stop: int = STEPS + 1, **values: Any) -> Act:
    """Changes steps of metrics.jsonl; a function gives the value of a step."""

    def act(run: Written) -> None:
        for row in run.rows[first - 1 : stop - 1]:
            row |= {name: value(row["iteration"]) if callable(value) else value for name, value in values.items()}

    return act


def event(iteration: int, kind: str, text: str = "", **more: Any) -> Act:
    return lambda run: run.events.append({"iteration": iteration, "event": kind, "text": text, **more})


def change(table: str, begin: int, names: Sequence[Any], **values: Any) -> Act:
    return lambda run: run.change(table, begin, names, values)


def once(table: str, *key: Any, **values: Any) -> Act:
    return lambda run: getattr(run, table)[key].update(values)


RESUMED = "resumed", "resumed from step_30: same"
NORM = "decoder.layers.1.input_layernorm"
GRADIENT, WEIGHT = (LAYERS[1], "dy"), f"{LAYERS[0]}.weight"
NAN = rows(40, loss=math.nan, grad_norm=None, applied=False, nonfinite_steps=lambda i: i - 39)
NATS: Act = lambda run: run.facts.update(nats_per_token=2.6)  # noqa: E731
REMEMBERED = change("operands", 26, [GRADIENT], scale=448 / 2.0 / 2**9, staleness=9.0)
CHANNEL = (change("weights", 35, [LAYERS[0]], amax=40.0, rms=1.0), change("linears", 35, [LAYERS[1]], x_outlier=90.0, x_channel=7), loss(31, 60, 1.0))  # fmt: skip
LAST = once("operands", STEPS, *GRADIENT, amax=2.0 * 2**9, scale=448 / 2.0, staleness=-9.0, saturated=0.1)
GREW, MOVED = change("weights", 10, LAYERS, rms=0.038), change("weights", 40, LAYERS[:3], rms=0.045)

CAUSES: dict[str, tuple[str | None, tuple[Act, ...], Any, str]] = {
    # name: (cause, 'healthy', None: nobody is accused, '!' before a cause that is not named first), what is changed, at which step, words of its sentence, tensors or advice
    "a jump right behind a resume": ("bad-resume", (loss(31, 61, 1.5), event(30, *RESUMED)), None, ""),
    "a jump long behind a resume": ("!bad-resume", (loss(31, 61, 1.5), event(12, *RESUMED)), None, ""),
    "data spoil single steps": ("data-spike", (loss(30, 32, 3.0),), None, "232 to 240"),
    "a model that recovers slowly": ("!data-spike", tuple(loss(i, i + 1, 3.0 * math.exp(-(i - 30) / 8)) for i in range(30, 61)), None, ""),
    "an element that is not finite, which the loss does not show": ("nan-source", (once("linears", 40, LAYERS[1], x_amax=math.nan, nonfinite=1),), 40, LAYERS[1]),
    "an overflow that fp16's loss scale caught": (None, (once("linears", 40, LAYERS[1], nonfinite=1), rows(1, loss_scale=4096.0), rows(40, 41, applied=False)), None, ""),
    "a jump long before a NaN": ("nan-source", (loss(15, 16, 3.0), NATS, NAN), None, ""),
    "a loss that rises ends in an overflow": (None, (loss(15, 16, 3.0), loss(37, 39, 3.0), NATS, NAN), None, ""),
    "NaN out of nowhere": ("nan-source", (rows(30, loss=math.nan, grad_norm=None, applied=False, nonfinite_steps=lambda i: i - 29), change("linears", 35, LAYERS[2:], x_amax=math.nan)), 30, LAYERS[2]),
    "a loss scale that falls without overflows": ("loss-scale", (rows(1, loss_scale=lambda i: 4096.0 if i < 30 else 2.0**-20),), 30, "vanish"),
    "a loss scale that its rule cannot make": ("loss-scale", (rows(1, loss_scale=lambda i: 4096.0 if i < 30 else 2.0**40, applied=lambda i: i < 30),), None, ""),
    "a run that finds its loss scale in a few steps, and doubles it now and then": ("healthy", (rows(1, loss_scale=lambda i: 2.0 ** max(24 - i, 18 + i // 40), applied=lambda i: i > 6),), None, ""),
    "one element of a matrix": ("weight-corrupted", (*CHANNEL, change("weights", 35, [LAYERS[0]], peak=0.9)), None, ""),
    "a row of a matrix": ("outlier-channel", (*CHANNEL, change("weights", 35, [LAYERS[0]], peak=0.05)), None, ""),
    "an outlier channel": ("outlier-channel", (change("linears", 35, [LAYERS[2]], x_outlier=3000.0, x_amax=4000.0), change("weights", 35, [NORM], amax=3000.0)), None, "channel 3"),
    "a flipped bit": ("weight-corrupted", (change("weights", 35, [LAYERS[1]], amax=1e4, rms=5.0),), None, ""),
    "weights that fell to nothing": ("weight-corrupted", (loss(38, 61), change("weights", 40, LAYERS[:3], rms=0.0, amax=0.0)), None, ""),
    # at a rate of 0.001 five updates move an element by about 0.005
    "a norm's gain of zero": ("weight-corrupted", (change("weights", 35, [NORM], rms=0.0, amax=0.0),), 35, f"{NORM}.weight was set to zero"),
    "a norm's gain of zero, and a spike behind it": ("weight-corrupted", (change("weights", 35, [NORM], rms=0.0, amax=0.0), loss(36, 61)), 35, f"{NORM}.weight: RMS 1 -> 0"),
    "weights that no update can have moved": ("weight-corrupted", (loss(38, 61), MOVED), 40, f"step 40: {WEIGHT}: RMS 0.027 -> 0.045"),
    "weights that a larger rate may have moved": ("!weight-corrupted", (loss(38, 61), MOVED, rows(31, lr=4e-3)), None, ""),
    "weights that grew long before a spike": (None, (rows(18, 19, grad_norm=20.0), GREW), None, ""),
    "weights that grew at once, with moments in proportion": ("weight-corrupted", (rows(11, 12, grad_norm=20.0), GREW), None, ""),
    "weights that grew right behind the update that moved them": ("moments-lost", (rows(11, 12, grad_norm=20.0), GREW, change("weights", 10, LAYERS, exp_avg_rms=1.5e-3)), None, ""),
    "second moments that are gone": ("moments-lost", (loss(34, 61), change("weights", 35, LAYERS, exp_avg_sq_mean=1e-9)), None, ""),
    "main weights that do not reach the model": ("lost-main-weights", (change("weights", 35, LAYERS, main_gap=0.9),), 35, ""),
    "a scale that is off": ("wrong-scale", (change("operands", 35, [(LAYERS[2], "x")], scale=448 / 2.2 * 2**9, staleness=-9.0, saturated=0.9),), None, f"{LAYERS[2]} x (row)"),
    "scales that stand still": ("frozen-scale", tuple(once("operands", step, name, "x", staleness=-step / 20) for step in range(5, 61, 5) for name in LAYERS), None, ""),
    "a history that remembers a spike": ("healthy", (once("operands", 25, *GRADIENT, amax=2.0 * 2**9), REMEMBERED), None, ""),
    "a spike that fell between two measurements": ("healthy", (REMEMBERED,), None, ""),
    "a remembered spike where the run suffers": ("wrong-scale", (REMEMBERED, loss(31, 61)), None, ""),
    "a scale that no spike explains": ("wrong-scale", (change("operands", 26, [GRADIENT], scale=448 / 2.0 / 2**14, staleness=14.0),), None, ""),
    "a spike that outruns its history, whose scale all earlier amaxes asked for": ("healthy", (LAST,), None, ""),
    "a scale that no measured amax asked for": ("wrong-scale", (LAST, once("operands", STEPS, *GRADIENT, scale=448 / 2.0 * 2**4, staleness=-13.0)), None, ""),
    "updates of the size of the weights": ("rate-too-high", (rows(1, lr=lambda i: min(0.3, 0.015 * i)), loss(18, 61), change("weights", 20, LAYERS, rms=0.5, amax=2.0)), None, ""),
    "a rate that jumps without harm": ("healthy", (rows(30, lr=0.1),), None, ""),
    "a warm restart behind a jump of the loss": ("!rate-too-high", (rows(30, lr=0.1), loss(20, 61, 4.0)), None, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_the_first_cause_is_the_one_that_was_planted_and_no_neighbour(run: Written, name: str) -> None:
    cause, acts, step, says = CAUSES[name]
    for act in acts:
        act(run)
    found = run.diagnosed()
    if cause == "healthy":
        assert found.healthy
    elif cause is not None and cause.startswith("!"):
        assert first(found) != cause[1:]
    else:
        assert first(found) == cause
    for one in found.suspects[:1]:
        assert step in (None, one.step)
        assert says in " ".join([one.sentence, *one.tensors, *one.advice, *one.evidence])


def test_a_jump_behind_a_change_of_recipe_is_the_recipes(run: Written) -> None:
    run.loss(range(33, 61), 1.5)
    run.events = [{"iteration": 30, "event": "recipe", "text": "a -> b", "after": "b"}]
    found = run.diagnosed()
    assert first(found) == "recipe-switch"
    assert found.changes == ["step 30: a -> b"]


def test_where_tokens_are_counted_they_decide_whether_the_data_did_it(run: Written) -> None:
    run.facts = {"nats_per_token": 2.6}
    run.loss(range(33, 35), 6.0)
    assert first(run.diagnosed()) is None
    assert run.diagnosed().verdict.startswith("step 33: the loss jumps")
    assert "precision shows no cause, and its tokens are like those before" in run.diagnosed().verdict
    # a model that takes long to recover is the data's too, where the tokens say so
    run.loss(range(35, 42), 3.0)
    run.events = [{"iteration": 33, "event": "tokens", "text": "the tokens of step 33 are unlike those before", "nats": 5.5, "usual": 2.6}]  # fmt: skip
    found = run.diagnosed()
    assert first(found) == "data-spike"
    assert found.suspects[0].step == 33
    # what was unlike long before a jump did not cause it
    run.events[0]["iteration"] = 20
    assert first(run.diagnosed()) is None


def test_a_spike_of_the_gradients_between_two_measurements_hides_no_wrong_scale(run: Written) -> None:
    run.rows[22]["grad_norm"] = 40.0
    run.change("operands", 24, [(LAYERS[1], "dy")], {"scale": 448 / 2.0 / 2**8.8, "staleness": 8.8})
    run.loss(range(41, 61), 2.0)
    found = run.diagnosed()
    assert found.suspects == [], "the history remembers the spike, and the loss jumps long after it"
    assert [one.number for one in found.onsets] == ["loss"], "what was over at once is no beginning"
    run.change("operands", 43, [(LAYERS[1], "dy")], {"scale": 448 / 2.0 / 2**23, "staleness": 23.0})
    found = run.diagnosed()
    assert (first(found), found.suspects[0].step) == ("wrong-scale", 45)


def test_a_jump_of_the_gradients_is_told_where_it_lasts_or_comes_with_the_loss_or_is_all_there_is(run: Written) -> None:
    run.rows[19]["grad_norm"] = 40.0
    assert [(one.step, one.number) for one in run.diagnosed().onsets] == [(20, "grad_norm")]
    run.loss(range(24, 61), 2.0)
    assert [one.step for one in run.diagnosed().onsets] == [20, 24]
    run.loss(range(24, 61), -2.0)
    run.loss(range(50, 61), 2.0)
    assert [one.step for one in run.diagnosed().onsets] == [50]
    rows(20, grad_norm=40.0)(run)
    assert [one.step for one in run.diagnosed().onsets] == [20, 50]


@pytest.mark.parametrize(("lost", "accused"), [("77", True), ("12", False)])
def test_weights_that_stop_moving_are_told_what_is_predicted_and_what_was_seen(
    run: Written, lost: str, accused: bool
) -> None:
    run.audited = {"weights moved": ["all", f"14 of 14, {lost}% of the updates of bf16 weights below rounding", "ok"]}
    rows(1, lr=1e-4)(run)
    found = run.diagnosed()
    assert (first(found) == "lost-updates") is accused
    if accused:
        said = "; ".join(found.suspects[0].evidence)
        assert "step 1: 77% of the updates of bf16 weights below rounding" in said
        # at step 1 m/sqrt(v) is the sign of the gradient, and noise of deviation 1 stands for it: E erf(half a gap / (sqrt 2 lr)) over N(0, 0.021)
        assert re.search(r"predicted at lr 0.0001, weights of 0.021 .*: 3[0-9]% lost", said)


def test_a_rate_that_jumps_is_named_without_statistics(run: Written) -> None:
    rows(40, lr=0.1)(run)
    run.loss(range(42, 61), 4.0)
    folder = run.write()
    (folder / FILE).unlink()
    found = diagnose(folder)
    assert first(found) == "rate-too-high"
    assert found.suspects[0].step == 40
    assert "100-fold, from 0.001 to 0.1" in found.suspects[0].sentence
    assert found.changes == ["step 40: learning rate 0.001 -> 0.1"], "a jump is no peak of a warm-up"


def test_a_resume_with_another_rate_is_the_rates(run: Written) -> None:
    rows(31, lr=0.05)(run)
    run.loss(range(32, 61), 2.0)
    run.events = [{"iteration": 30, "event": "resumed", "text": "resumed from step_30: same"}]
    found = run.diagnosed()
    assert [one.cause for one in found.suspects[:2]] == ["rate-too-high", "bad-resume"]
    assert "step 31: learning rate 0.001 -> 0.05" in found.suspects[1].evidence


def test_a_peak_is_only_said_of_a_warm_up_that_ended(run: Written) -> None:
    rows(1, lr=lambda step: 1e-4 * step)(run)
    assert run.diagnosed().changes == []
    run.loss(range(42, 61), 4.0)
    (run.write() / FILE).unlink()
    found = diagnose(run.folder)
    assert found.changes == ["step 42: the learning rate is still rising, 0.0042"]
    assert "the learning rate was still rising there" in found.verdict
    rows(1, lr=lambda step: 1e-4 * min(step, 20))(run)
    assert run.diagnosed().changes == ["step 20: the learning rate reaches its peak, 0.002"]


def test_second_moments_that_fell_faster_than_any_gradient_lets_them(run: Written) -> None:
    run.config = {"optimizer": {"lr": 1e-3}}
    assert run.diagnosed().healthy
    # after five steps at least 0.999**5 of them are left; neither loss nor gradients show anything
    for (step, _), row in run.weights.items():
        row["exp_avg_sq_mean"] = 1e-6 if step < 35 else 3e-7
    found = run.diagnosed()
    assert [(one.cause, one.step) for one in found.suspects] == [("moments-lost", 35)]
    assert found.suspects[0].evidence == [
        "step 35: second moments of 5 of 5 parameters fell to 0.3 times those of step 30 (median), and 5 steps reduce them to no less than 0.995 times"
    ]
    run.events = [{"iteration": 30, "event": "resumed", "text": "resumed from step_30: same", "verdict": "same"}]
    found = run.diagnosed()
    assert [(one.cause, one.step) for one in found.suspects] == [("bad-resume", 31)]
    assert found.suspects[0].sentence.endswith("the optimizer's moments were lost")
    # dropped on purpose, held by other ranks, an optimizer that forgets this fast, settings that nobody knows
    moved = "resumed from step_30: safe\n  note: parallel: tensor 2 -> 1"
    for event in ({"optimizer_reset": True}, {"event": "rollback"}, {"text": moved}):
        run.events = [{"iteration": 30, "event": "resumed", "text": "resumed from step_30: same", **event}]
        assert run.diagnosed().healthy, event
    run.events = [{"iteration": 30, "event": "evaluated"}]
    for config in ({"optimizer": {"adam_beta2": 0.8}}, {}):
        run.config = config
        assert run.diagnosed().healthy, config


def test_charts_of_a_run_share_their_axis_and_break_where_a_value_is_not_finite(run: Written) -> None:
    rows(41, 46, grad_norm=math.nan)(run)
    page = diagnosis_page(diagnose(run.write()))
    charts = {block["title"]: block for block in page.blocks if block["kind"] == "chart"}
    assert {tuple(block["reach"]) for block in charts.values()} == {(1, STEPS)}
    norm = charts["gradient norm before clipping"]
    assert [y for x, y in norm["series"][0]["points"] if 40 <= x <= 46] == [run.rows[39]["grad_norm"], *["nan"] * 5, run.rows[45]["grad_norm"]]  # fmt: skip
    assert norm["note"] == "Not drawn: 5 steps, the first of them 41, are without a finite value."
    assert charts["loss"]["note"] == ""


def test_of_wrong_scales_the_one_whose_tensor_did_not_change_is_named(run: Written) -> None:
    run.rows[19]["grad_norm"] = 30.0
    for name in LAYERS[:2]:  # gradients that outran their history, and were back at the next measurement
        run.operands[20, name, "dy"]["staleness"] = -4.0
    run.change("operands", 45, [(LAYERS[0], "w")], {"staleness": 17.0, "scale": 1e-2})
    found = run.diagnosed().suspects[0]
    assert (found.cause, found.step, found.score) == ("wrong-scale", 45, 0.97)
    assert found.tensors == [f"{LAYERS[0]} w (row)"]


def test_moments_that_the_run_itself_missed_behind_a_resume(run: Written) -> None:
    run.events = [
        {"iteration": 30, "event": "resumed", "text": "resumed from step_30: same"},
        {"iteration": 31, "event": "moments", "text": "the optimizer's second moments are 0.05 times those of the checkpoint"},
    ]  # fmt: skip
    (run.write() / FILE).unlink()
    found = diagnose(run.folder)
    assert first(found) == "bad-resume"
    assert f"step 31: {run.events[1]['text']}" in found.suspects[0].evidence
    run.events = run.events[:1]
    assert run.diagnosed().healthy


# --- files in any state --------------------------------------------------------------------------------------------------------------------
def test_half_written_files_say_what_can_still_be_told(run: Written, cli) -> None:
    run.loss(range(30, 32), 3.0)
    folder = run.write()
    for name in ("metrics.jsonl", FILE):
        text = (folder / name).read_text()
        (folder / name).write_text(text[:-40])
    (folder / "precision.json").write_text("{")
    (folder / "events.jsonl").write_text("nonsense\n")
    out = cli("diagnose", folder, code=1)
    assert "1. data-spike" in out
    cut = ("metrics.jsonl, line 60: truncated", "statistics.jsonl, line 12: truncated")
    assert [gap for gap in (*cut, "no audits", "events.jsonl, line 1") if gap not in out] == []


def test_a_run_without_statistics_is_diagnosed_by_its_curves_and_audits(run: Written) -> None:
    run.loss(range(30, 32), 3.0)
    folder = run.write()
    (folder / FILE).unlink()
    found = diagnose(folder)
    assert first(found) == first(diagnose(folder / "metrics.jsonl")) == "data-spike"
    assert any("precision_every" in gap for gap in found.run.gaps)
    # what an audit sees where the loss jumps is not taken for the data's
    audits = [{"step": 2, "ok": True, "facts": {}}, {"step": 30, "ok": False, "facts": {}, "faults": ["invariants: linear_proj: had 0 hooks, has 1"]}]  # fmt: skip
    (folder / "precision.json").write_text(json.dumps({"recipe": "r", "audit": {"history": audits}}))
    assert [one.cause for one in diagnose(folder).suspects] == ["not-as-promised"]
    audits[0]["ok"] = False  # nothing that began there
    (folder / "precision.json").write_text(json.dumps({"recipe": "r", "audit": {"history": audits}}))
    assert first(diagnose(folder)) == "data-spike"


def test_what_cannot_be_read_is_said_in_a_few_lines_and_few_steps_are_no_verdict(run: Written) -> None:
    run.rows, run.steps = run.rows[:3], list(range(1, 4))
    folder = run.write()
    (folder / FILE).write_text('{"schema":7,"iteration":1}\n' * 500)
    (folder / "precision.json").unlink()
    gaps = diagnose(folder).run.gaps
    assert len(gaps) < 10
    assert any("schema 7" in gap for gap in gaps), "of another version"
    assert "statistics.jsonl: 496 more lines like these" in gaps
    assert "no precision.json: recipe, settings and audits are not known" in gaps
    assert "3 steps are too few to tell what is usual for a curve; 7 are needed" in gaps
    assert diagnose(folder).verdict == "nothing is out of line, but there are too few steps to tell"
    assert '"word":"no verdict"' in diagnosis_page(diagnose(folder)).html()


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("metrics.jsonl", '{"iteration": 100, "loss": {"a": 1}}'),
        ("metrics.jsonl", f'{{"iteration": {10**400}, "loss": 1.0}}'),
        ("metrics.jsonl", '{"iteration": 100, "loss": 1.0, "applied": "perhaps", "nonfinite_steps": "many"}'),
        (FILE, '{"schema": 1, "iteration": 100, "operands": {"columns": ["linear"], "rows": [["a"]]}}'),
        (FILE, line({"iteration": 100}, {"weights": [["w", 1.0, [2.0], 0, 0.0, None, None, None]]}).strip()),
        ("events.jsonl", '{"iteration": 1e999, "event": "resumed"}'),
    ],
)
def test_a_line_of_another_kind_is_left_out_and_said(run: Written, file: str, text: str) -> None:
    folder = run.write()
    with (folder / file).open("a") as stream:
        stream.write(text + "\n")
    found = diagnose(folder)
    assert found.healthy
    assert [gap for gap in found.run.gaps if gap.startswith(file) and "unreadable" in gap]
    diagnosis_page(found).html()


@pytest.mark.parametrize("value", [3, [1], {"config": [1], "versions": 4, "audit": {"history": [{"step": "x", "ok": False, "facts": {}}]}}])  # fmt: skip
def test_settings_of_another_kind_are_left_out_and_said(run: Written, value: object) -> None:
    folder = run.write()
    (folder / "precision.json").write_text(json.dumps(value))
    found = diagnose(folder)
    assert found.healthy
    assert "precision.json contains no audits that this version can read" in found.run.gaps
    diagnosis_page(found).html()


@pytest.mark.timeout(1200)
def test_a_fifo_in_a_runs_folder_is_not_waited_for(run: Written) -> None:
    folder = run.write()
    for name in (FILE, "events.jsonl", "precision.json"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    found = diagnose(folder)
    assert [gap for gap in found.run.gaps if FILE in gap and "a FIFO" in gap]
    assert "events.jsonl: it is a FIFO, expected a regular file" in found.run.gaps


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="expected the folder of a run"):
        diagnose(tmp_path)


def test_another_run_beside_it_says_where_they_part(run: Written) -> None:
    other = Written(run.folder.parent / "other").write()
    run.loss(range(30, 61), 2.0)
    run.change("linears", 35, [LAYERS[0]], {"x_amax": 50.0})
    found = diagnose(run.write(), other)
    text = "\n".join(found.against)
    assert "step 30: loss" in text
    assert f"step 35: the first measured step at which tensors differ by more than a factor of two: {LAYERS[0]}" in text


def test_another_run_beside_it_says_which_updates_and_loss_scales_differ(run: Written) -> None:
    other = Written(run.folder.parent / "other")
    for one in (run, other):
        rows(1, loss_scale=65536.0)(one)
        one.rows[2]["applied"] = False
    alike = "\n".join(diagnose(run.write(), other.write()).against)
    assert "loss scale: equal to the other run's at every step" in alike
    assert "skipped updates: the same steps, 1 of the 60 steps that both have" in alike
    rows(25, loss_scale=32768.0)(run)
    run.rows[23]["applied"] = run.rows[30]["applied"] = False
    text = "\n".join(diagnose(run.write(), other.folder).against)
    assert "step 25: loss scale 32768, the other run 65536: the first difference" in text
    assert "step 24: this run skipped its update, the other run did not; 3 of the 60 steps that both have were skipped, in the other run 1" in text  # fmt: skip


def test_a_run_without_statistics_is_not_compared_by_tensors_and_says_what_it_still_tells(run: Written, cli) -> None:
    other = Written(run.folder.parent / "other")
    (other.write() / FILE).unlink()
    for one, two, which in ((run.write(), other.folder, "the other run"), (other.folder, run.folder, "this run")):
        said = diagnose(one, two).against
        assert f"tensors cannot be compared: {which} has no statistics (logger.precision_every)" in said
        assert not [line for line in said if "at every measured step" in line]
    both = "tensors cannot be compared: this run and the other run have no statistics (logger.precision_every)"
    assert both in diagnose(other.folder, other.folder).against
    assert not diagnose(run.folder).run.remaining
    told = cli("diagnose", other.folder).partition("What can still be determined:")[2]
    assert f"{STEPS} steps of loss, gradient norm" in told


def test_what_two_runs_do_not_both_have_is_not_compared(run: Written, tmp_path: Path) -> None:
    other = Written(tmp_path / "other")
    for row in other.rows:
        row["iteration"] += 100
        row.pop("grad_norm")
    said = "\n".join(diagnose(run.write(), other.write()).against)
    assert "% of the other run's" not in said
    assert "loss: no step at which both runs have it" in said
    assert "gradient norm: only this run has it" in said
    for one in (run, other):
        for row in one.rows:
            row.pop("grad_norm", None)
            row["iteration"] = (row["iteration"] - 1) % 100 + 1
            row["loss"] = math.inf if row["iteration"] > 20 else row["loss"]
    said = "\n".join(diagnose(run.write(), other.write()).against)
    assert "loss: within 5% of the other run's at every step that both have" in said
    assert "gradient norm" not in said


def test_settings_of_runs_that_broke_off_are_compared(run: Written) -> None:
    for made, rate in ((run, 1.0), (other := Written(run.folder.parent / "other"), 0.1)):
        made.write()
        settings = {"optimizer": {"lr": rate}}
        (made.folder / "precision.json").write_text(json.dumps({"recipe": "r", "config": settings}))
    assert "optimizer.lr: 1.0, the other run 0.1" in diagnose(run.folder, other.folder).against


def test_statistics_that_are_too_large_are_sampled_and_the_first_tensor_out_of_line_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Written(tmp_path / "run", every=1)
    for step in range(33, STEPS + 1):
        run.linears[step, LAYERS[2]] |= {"x_outlier": 3000.0, "x_amax": 4000.0}
        run.weights[step, "decoder.layers.1.input_layernorm.weight"] |= {"amax": 3000.0}
    folder = run.write()
    monkeypatch.setattr(records, "LARGEST", (folder / FILE).stat().st_size // 5)
    found = diagnose(folder)
    assert (first(found), found.suspects[0].step) == ("outlier-channel", 33)
    assert 8 < len(found.run.measured) <= 13
    assert any("of its 60 measurements were read" in gap for gap in found.run.gaps)


def test_a_deep_models_page_has_a_heat_map_and_experts_in_their_order(tmp_path: Path) -> None:
    def kinds(layers: int) -> list[tuple[str, list[str]]]:
        run = Written(tmp_path / f"{layers} layers", every=20)
        for step in run.steps:
            for i in range(layers):
                for name in ("self_attention.linear_qkv", *(f"mlp.experts.local_experts.{n}.linear_fc1" for n in (10, 2, 0))):  # fmt: skip
                    linear = f"decoder.layers.{i}.{name}"
                    run.linears[step, linear] = run.linears[20, LAYERS[0]] | {"linear": linear, "x_amax": 1.0 + i * step}  # fmt: skip
        return [(block["title"], block["kinds"]) for block in precision_page(gather(run.write())).blocks if block["kind"] == "heat"]  # fmt: skip

    assert [title for title, _ in kinds(7)] == ["Median row error by layer, step 60"]
    title, found = kinds(9)[1]
    assert title == "amax of each linear's input: how far it moves"
    experts = [f"mlp.experts.local_experts.{n}.linear_fc1" for n in (0, 2, 10)]
    assert [kind for kind in found if "experts" in kind] == experts


def test_the_page_links_the_verdict_to_its_plot(run: Written, tmp_path: Path) -> None:
    run.change("operands", 35, [(LAYERS[2], "x")], {"scale": 448 / 2.2 * 2**9, "staleness": -9.0, "saturated": 0.9})
    assert main(["diagnose", str(run.write()), "--out", str(tmp_path / "page.html")]) == 1
    text = (tmp_path / "page.html").read_text()
    data = json.loads(text.partition('type="application/json">')[2].partition("</script>")[0])
    by_id = {block["id"]: block for block in data["blocks"]}
    (cause,) = [item for block in data["blocks"] if block["kind"] == "verdicts" for item in block["items"] if item.get("word") == "wrong-scale"]  # fmt: skip
    assert by_id[cause["href"]]["title"] == "staleness of each delayed scale"
    assert main(["precision", str(run.folder)]) == 0
    assert (run.folder / "precision.html").stat().st_size < 2_000_000


def test_out_is_checked_before_the_work(run: Written, cli) -> None:
    assert "does not exist" in cli("diagnose", run.write(), "--out", run.folder / "nowhere" / "page.html", code=2)


def test_a_loss_that_climbs_slowly_is_read_to_the_end(tmp_path: Path) -> None:
    run = Written(tmp_path / "run")
    rows(1, loss=lambda step: 2 + 0.05 * step)(run)
    assert diagnose(run.write())
