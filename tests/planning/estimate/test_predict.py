"""Predictions against published runs, and what a prediction says about itself."""

from __future__ import annotations

import dataclasses
import json
import statistics

import pytest

from mpbridge.common.errors import BadValue
from mpbridge.common.machines import machine
from mpbridge.planning.capability import ASSUMED
from mpbridge.planning.estimate.constants import DATA
from mpbridge.planning.estimate.predict import estimate
from mpbridge.planning.memory.by_role import memory as bytes_of
from mpbridge.planning.memory.overheads import left_out_of_memory
from mpbridge.settings.container import ConfigContainer
from scripts.evidence.published import CORES, FITTED, UNUSUAL, priced, run_of, timed


@pytest.fixture(scope="module")
def predicted():
    return [(row, estimate((run := run_of(row)).policy, run.facts)) for row in timed()]


def usual(predicted, fitted=True):
    """Those with usual kernels, of the releases that were fitted or of the others."""
    here = [(row, one) for row, one in predicted if row["model"] not in UNUSUAL]
    return [(row, one) for row, one in here if (row["release"] in FITTED) == fitted]


def errors(predicted, fitted=True):
    """Their relative errors of tokens/s per GPU."""
    return [one.tokens_per_second / row["tokens"] - 1 for row, one in usual(predicted, fitted)]


def test_published_speeds_are_met_in_sample(predicted):
    off = sorted(abs(e) for e in errors(predicted))
    assert statistics.median(off) <= 0.06
    assert off[int(0.9 * len(off))] <= 0.16


def test_the_band_holds_nine_of_ten(predicted):
    for fitted in (True, False):
        real = [(one.seconds * one.tokens_per_second / row["tokens"], one) for row, one in usual(predicted, fitted)]
        inside = [one.span[0] <= seconds <= one.span[1] for seconds, one in real]
        assert sum(inside) >= 0.9 * len(inside)
    odd = [one for row, one in predicted if row["model"] in UNUSUAL]
    assert all("attention sinks" in one.because for one in odd)
    assert all(one.span[0] == one.seconds < one.span[1] for one in odd)
    longer = [one.tokens_per_second / row["tokens"] for row, one in predicted if row["model"] in UNUSUAL]
    assert sum(1 <= times <= 1 + odd[0].band for times in longer) >= 0.9 * len(longer)


def test_parts_sum_to_the_step(predicted):
    for _, one in predicted:
        assert sum(one.parts.values()) == pytest.approx(one.seconds)
        assert min(one.parts.values()) > 0


def test_shipped_constants_say_what_they_were_fitted_to():
    data = json.loads(DATA.read_text())
    usual = {row["id"] for row in timed() if row["model"] not in UNUSUAL and row["release"] in FITTED}
    assert set(data["rows"]) == usual
    assert set(data["releases"]) == {".".join(CORES[name].split(".")[:2]) for name in FITTED}
    free = [name for name, entry in data["shared"].items() if entry["free"]]
    assert len(free) == 7  # more are not identified by the rows
    assert set(data["machines"]) == {row["machine"] for row in priced()}


def test_the_band_grows_with_what_was_not_fitted(predicted):
    row, one = predicted[6]
    run = run_of(row)
    assert one.because == "published runs on H100"
    kin, stranger = (estimate(run.policy, run.facts, machine(name)) for name in ("h200", "l40s"))
    assert one.band < kin.band < stranger.band
    assert "H200" in kin.because
    newer = dataclasses.replace(run.facts, versions=dataclasses.replace(run.facts.versions, megatron_core="0.18.1"))
    later = estimate(run.policy, newer)
    assert (later.seconds, later.band > one.band) == (one.seconds, True)
    assert "none with megatron-core 0.18.1" in later.because


def test_speeds_of_releases_that_nobody_fitted_are_met(predicted):
    found = [abs(error) for error in errors(predicted, fitted=False)]
    assert len(found) == 43
    assert statistics.median(found) < 0.07
    assert statistics.quantiles(found, n=10)[-1] < 0.17


def test_tensorwise_is_faster_than_mxfp8_where_it_was(predicted):
    keys = ("release", "model", "machine", "gpus", "global_batch", "micro_batch", "tensor", "pipeline", "virtual")
    by = {(row["precision"], *(row[key] for key in keys)): (row, one) for row, one in predicted}
    pairs = [(by["FP8", *key], by["MXFP8", *key]) for name, *key in by if name == "FP8" and ("MXFP8", *key) in by]
    assert len(pairs) == 8
    for (row, one), (other, two) in pairs:
        assert row["tokens"] > other["tokens"]
        assert one.seconds < two.seconds


@pytest.mark.parametrize("group", [("model", "llama3_8b", 12), ("machine", "B200", 21)], ids=lambda group: group[1])
def test_neither_a_small_model_nor_a_board_is_always_predicted_too_slow_or_too_fast(predicted, group):
    key, name, count = group
    off = [one.tokens_per_second / row["tokens"] - 1 for row, one in predicted if row[key] == name and row["model"] not in UNUSUAL]  # fmt: skip
    assert len(off) == count
    assert abs(statistics.median(off)) < 0.05


def test_what_is_not_priced_is_named():
    run = run_of(priced()[6])
    missing = dataclasses.replace(machine("rtx4090"), name="X")
    one = estimate(run.policy, dataclasses.replace(run.facts, machine=missing))
    assert any("no network in the table" in line and "slower" in line for line in one.left_out)
    with pytest.raises(BadValue, match="no rates"):
        estimate(run.policy, run.facts, machine("cpu"))


@pytest.mark.parametrize(("settings", "what", "time", "memory", "exact"), [
    ({"is_hybrid_model": True}, "state-space layers (Mamba)", "faster", "smaller", False),
    ({"linear_attention_freq": 4}, "linear attention", "faster", "larger", False),
    ({"variable_seq_lengths": True}, "packed sequences", "faster", "at most as large", True), ({}, "", "", "", True),
], ids=["hybrid", "linear attention", "packed", "plain"])  # fmt: skip
def test_what_is_counted_as_something_else_is_named_with_the_sign_of_the_error(settings, what, time, memory, exact):
    box = ConfigContainer.load("configs/gpt_tiny.yaml", [], check=False)
    run = box.resolved(1, machine=machine("h100"), versions=ASSUMED, training=False)
    facts = dataclasses.replace(run.facts, model={**run.facts.model, **settings})
    for said, sign in ((estimate(run.policy, facts).left_out, time), (left_out_of_memory(facts), memory)):
        assert len(said) == bool(what)
        assert all(what in line and sign in line for line in said)
    assert bytes_of(run.policy, facts).exact is exact


def test_faster_links_memory_and_products_never_slow_a_step_down():
    run = run_of(priced()[8])
    base = machine("gb200")
    whole = estimate(run.policy, run.facts, base).seconds
    twice = {name: 2 * getattr(base, name) for name in ("nvlink", "network", "bandwidth")}
    twice["peak"] = tuple((f, 2 * p) for f, p in base.peak)
    for change in ({name: value} for name, value in twice.items()):
        assert estimate(run.policy, run.facts, dataclasses.replace(base, **change)).seconds <= whole


def test_the_verb_prints_a_band_and_json(cli):
    asked = ["estimate", "--config", "llama3_70b", "--world-size", "64", "--target", "gb200", "--price", "2"]
    text = cli(*asked)
    assert "a prediction" in text
    assert "published runs on GB200" in text
    data = json.loads(cli(*asked, "--json"))
    assert data["predicted"]
    assert data["price_per_billion_tokens"] == pytest.approx(2 * data["gpu_hours_per_billion_tokens"])
    assert data["reference"]["seconds"] > data["seconds"]
    assert (data["recipe"], data["reference"]["recipe"]) == ("bf16_with_fp8_current_scaling_mixed", "bf16_mixed")


def test_a_recipe_that_the_machine_cannot_run_is_refused(cli):
    where = ["--config", "llama3_70b", "--world-size", "64", "--target", "h100"]
    assert "NVFP4" in cli("estimate", *where, "--recipe", "nvfp4", code=1, error=True)


@pytest.mark.parametrize("verb", ["estimate", "recommend", "layouts", "memory"])
def test_no_verb_makes_up_a_world(verb, cli):
    printed = cli(verb, "--config", "gpt_tiny", "--target", "h100", "--world-size", "0", code=2)
    assert "--world-size 0: expected at least 1" in printed


@pytest.mark.parametrize("verb", ["estimate", "recommend"])
@pytest.mark.parametrize("price", ["-1", "nan", "inf", "two"])
def test_a_price_is_a_number_of_zero_or_more(verb, price, cli):
    printed = cli(verb, "--config", "gpt_tiny", "--target", "h100", f"--price={price}", code=2)
    assert "not a price: expected a number of 0 or more" in printed


@pytest.mark.parametrize("verb", ["estimate", "recommend", "layouts"])
def test_every_verb_that_predicts_names_what_it_leaves_out(verb, cli):
    asked = [verb, "--config", "gpt_tiny", "--target", "l40s", "train.global_batch_size=16", "--world-size"]
    assert "left out: traffic between hosts: L40S has no network" in cli(*asked, "16")
    assert "left out" not in cli(*asked, "4")


def test_sizes_that_fit_no_recipe_are_said_once(cli):
    printed = cli("recommend --config llama3_8b --target h100 --world-size 7", code=2)
    assert printed.count("7 processes cannot be divided into tensor 2") == 1
    assert "sizes must divide 7 GPUs" in cli("layouts --config llama3_8b --target h100 --world-size 7", code=1)


def test_unusual_kernels_are_said_to_take_longer_in_one_direction(cli):
    where = ["--config", "gpt_oss_120b", "--target", "gb200", "--world-size", "64"]
    data = json.loads(cli("estimate", *where, "--json"))
    assert data["span"] == [data["seconds"], pytest.approx(2.17 * data["seconds"])]
    for verb in ("estimate", "layouts", "recommend"):
        assert "published runs of such a model take longer than predicted" in " ".join(cli(verb, *where).split())
