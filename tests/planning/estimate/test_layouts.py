"""Layouts that a search proposes are legal, fit and are the ones that were asked for; calibration and own runs feed predictions."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from collections import Counter

import pytest

from mpbridge.common.errors import BadValue
from mpbridge.common.machines import machine
from mpbridge.planning.capability import ASSUMED
from mpbridge.planning.estimate.bounds import FamilyBounds
from mpbridge.planning.estimate.candidates import families, line, placement
from mpbridge.planning.estimate.constants import read_machine
from mpbridge.planning.estimate.layouts import _Pool, nearest, search
from mpbridge.planning.estimate.predict import estimate, timing
from mpbridge.planning.memory.by_role import memory, verdict
from mpbridge.planning.memory.ranks import parse_layout
from mpbridge.planning.rules.table import broken
from mpbridge.settings.container import ConfigContainer

H100 = machine("h100")


def facts_of(config, world, *overrides):
    box = ConfigContainer.load(f"configs/{config}.yaml", list(overrides), check=False)
    run = box.resolved(world, machine=H100, versions=ASSUMED, training=False)
    return run.policy, dataclasses.replace(run.facts, environment={})


@pytest.mark.parametrize(("config", "world"), [("llama3_8b", 16), ("moe_tiny", 4)])
def test_found_layouts_are_legal_and_fit_and_their_line_says_them(config, world):
    policy, facts = facts_of(config, world)
    found = search(policy, facts, H100, most=3)
    assert found
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    for one in found:
        assert verdict(memory(policy, one.run), H100.memory_bytes) != "does not fit"
        assert not [v for v in broken(policy, one.run) if v.severity == "error"]
        again = facts_of(config, world, *shlex.split(one.line))[1]
        assert again.parallel == one.run.parallel
        assert again.micro_batch_size == one.run.micro_batch_size


def exhaustive(policy, facts, target):
    """Every candidate priced on its own, with the memory of every stage; of those alike the fastest that fits."""
    found = []
    for run in everything(policy, facts, target):
        every = run.parallel.world_size // run.parallel.pipeline
        held = [memory(policy, run, rank=stage * every) for stage in range(run.parallel.pipeline)]
        full = max(held, key=lambda one: one.needed)
        if verdict(full, target.memory_bytes) == "does not fit":
            continue
        if any(violation.severity == "error" for violation in broken(policy, run)):
            continue
        at, answer = run.parallel, verdict(full, target.memory_bytes)
        sizes = (at.tensor, at.pipeline, at.expert, run.micro_batch_size / at.context)
        found.append((estimate(policy, run, target).seconds, full.needed, answer, sizes, run))
    kept = {}
    for one in sorted(found, key=lambda one: (one[2] == "tight", one[0], one[4].parallel.context, one[1])):
        kept.setdefault(one[3], one)
    return [plainest(one, found)[:2] for one in kept.values()], len(found)


def plainest(one, found):
    """Of those that differ in virtual stages alone and in less than 1 % the one with the fewest."""
    alike = [other for other in found if without_virtual(other[4]) == without_virtual(one[4])]
    near = [other for other in alike if other[2] == one[2] and other[0] < one[0] * 1.01]
    return min(near, key=lambda other: other[4].parallel.virtual_pipeline or 1)


def without_virtual(run):
    sizes = dataclasses.replace(run.parallel, virtual_pipeline=None)
    return sizes, run.micro_batch_size, run.model["recompute_granularity"], run.optimizer.distributed


def everything(policy, facts, target):
    """Every candidate."""
    return itertools.chain(*families(policy, facts, target))


@pytest.mark.parametrize(("config", "world", "gib", "fitting"), [
    ("gpt_tiny", 4, 80, "all"), ("moe_tiny", 2, 80, "all"), ("gpt_tiny", 4, 0.65, "some"), ("gpt_tiny", 2, 0.5, "none"),
], ids=["dense", "experts", "little room", "no room"])  # fmt: skip
def test_the_search_finds_what_looking_at_every_candidate_finds(config, world, gib, fitting):
    target = dataclasses.replace(H100, memory_bytes=int(gib * 2**30))
    policy, facts = facts_of(config, world)
    facts = dataclasses.replace(facts, machine=target)
    every, possible = exhaustive(policy, facts, target)
    found = [(one.seconds, one.needed) for one in search(policy, facts, target, most=6)]
    assert found == [pytest.approx(pair) for pair in every[:6]]
    count = len(list(everything(policy, facts, target)))
    assert ("none" if not every else "all" if possible == count else "some") == fitting
    assert count > len(every)


@pytest.mark.parametrize(("layers", "ahead", "chunks"), [(61, 1, 16), (61, 1, 8), (61, 0, 32), (61, 1, 2), (7, 1, 4)])
def test_layers_that_do_not_divide_are_placed_so_that_no_chunk_holds_more_than_its_share(layers, ahead, chunks):
    (text,) = placement(layers, ahead, chunks).values()
    rows = parse_layout(text)
    held = [row.count("decoder") for row in rows]
    assert len(rows) == chunks
    assert sum(held) == layers
    assert max(held) == -(-layers // chunks)
    assert (rows[0][0], rows[-1][-1], rows[-1].count("mtp")) == ("embedding", "loss", ahead)


def test_few_layers_are_not_spread_over_many_chunks():
    assert placement(61, 1, 64) is None
    assert placement(126, 0, 64) == {f"account_for_{what}_in_pipeline_split": True for what in ("embedding", "loss")}


def test_deepseek_v3_gets_layouts_whose_layers_do_not_divide():
    batch, experts = "train.global_batch_size=4096", "parallel.expert_model_parallel_size=64"
    policy, facts = facts_of("deepseek_v3_671b", 1024, batch, experts)
    wide = machine("gb200")
    (best,) = search(policy, dataclasses.replace(facts, machine=wide), wide, most=1)
    assert best.run.parallel.pipeline > 1
    again = facts_of("deepseek_v3_671b", 1024, batch, *shlex.split(best.line))[1]
    assert again.model["pipeline_model_parallel_layout"] == best.run.model["pipeline_model_parallel_layout"]
    assert again.model.get("recompute_modules") == best.run.model.get("recompute_modules")


def test_llama_405b_on_16384_gpus_gets_its_published_kind_of_layout():
    policy, facts = facts_of("llama3_405b", 16384, "train.global_batch_size=2048")
    best = search(policy, facts, H100, most=1)[0].run.parallel
    assert best.tensor == 8
    assert best.pipeline >= 8


def test_the_nearest_layout_that_fits_may_need_more_gpus():
    policy, facts = facts_of("llama3_8b", 2)
    assert verdict(memory(policy, facts), H100.memory_bytes) == "does not fit"
    found = nearest(policy, facts, H100)
    assert found is not None
    assert verdict(memory(policy, found), H100.memory_bytes) == "fits"
    assert "parallel.tensor_model_parallel_size=" in line(found)
    policy, facts = facts_of("llama3_70b", 32)
    small = dataclasses.replace(H100, memory_bytes=24 * 2**30)
    wider = nearest(policy, dataclasses.replace(facts, machine=small), small)
    assert wider is not None
    assert wider.parallel.world_size > 32


MACHINE = """\
machine: cpu
name: here
peak: {fp32: 0.05, bf16: 0.2}
bandwidth: 1.0e+10
nvlink: 1.0e+9
constants: {gemm_bf16: 1.0, memory: 1.0, host: 0.5}
"""


def test_a_machine_file_replaces_rates_and_constants(file, cli):
    path = file("m.yaml", MACHINE)
    made, held = read_machine(path)
    assert made.flops("bf16") == 0.2e12
    assert held.of("gemm_bf16") == 1.0
    assert held.of("attention") > 1.5
    said = cli("estimate --config gpt_tiny --machine-file", path)
    assert "here: a prediction" in said
    assert "TFLOP/s 0 a GPU" not in said
    assert "calibrate measured" in said
    assert "published" not in said
    faster = file("f.yaml", MACHINE.replace("bf16: 0.2", "bf16: 2.0"))
    seconds = []
    for name in (path, faster):
        printed = cli("estimate --config gpt_tiny --machine-file", name, "--json")
        seconds.append(json.loads(printed)["seconds"])
    assert seconds[1] < seconds[0] / 2


@pytest.mark.parametrize(("text", "said"), [
    pytest.param("[1]", "expected the mapping", id="list"),
    pytest.param("machine: cpu\npeak: {bf16: -1}", "peak.bf16=-1", id="negative"),
    pytest.param("machine: cpu\npeak: {int3: 1}", "unknown peak.int3", id="unknown format"),
    pytest.param("machine: cpu\npeak: {bf16: 1}\ndomain: 0.5", "domain=0.5, expected at least 1", id="no whole number"),
    pytest.param("machine: cpu\npeak: {bf16: 1}\nspeed: 3", "unknown speed", id="unknown key"),
    pytest.param("machine: cpu\npeak: {bf16: 1}\nconstants: {nope: 1}", "unknown constants.nope", id="unknown constant"),
    pytest.param("machine: ht100\npeak: {bf16: 1}", "ht100", id="unknown machine"),
    pytest.param("a: [", "not YAML", id="no YAML"), pytest.param("x" * 70000, "more than", id="too large"),
])  # fmt: skip
def test_a_wrong_machine_file_is_named(file, text, said):
    path = file("m.yaml", text)
    with pytest.raises(Exception, match=said) as error:
        read_machine(path)
    assert type(error.value).__module__ == "mpbridge.common.errors"


def test_a_measured_run_stands_beside_its_prediction(tmp_path, cli):
    (tmp_path / "m.yaml").write_text(MACHINE)
    config = ConfigContainer.load("configs/gpt_tiny.yaml", [], check=False).as_data()
    data = {
        "recipe": "bf16_mixed", "seconds": 0.5, "tokens_per_second": 4096.0, "steps": 10, "world_size": 1, "config": config,
    }  # fmt: skip
    (tmp_path / "timing.json").write_text(json.dumps(data))
    assert timing(tmp_path).seconds == 0.5
    printed = cli("estimate --against", tmp_path, "--machine-file", tmp_path / "m.yaml")
    assert "measured: 0.5 s (median of 10 steps)" in printed
    (tmp_path / "timing.json").write_text("{}")
    with pytest.raises(BadValue, match="not the timing of a run"):
        timing(tmp_path)


def test_recommend_sorts_by_what_is_asked_and_prefers_what_was_measured(tmp_path, cli):
    data = {"recipe": "bf16_mixed", "seconds": 0.001, "tokens_per_second": 1e6, "steps": 10, "world_size": 8, "config": {}}  # fmt: skip
    (tmp_path / "timing.json").write_text(json.dumps(data))
    orders, where = {}, ["--config", "llama3_8b", "--target", "h100", "--world-size", "8", "--json"]
    for by, key in (("time", "seconds"), ("memory", "bytes")):
        every = json.loads(cli("recommend", *where, "--by", by))["recipes"]
        rows = [row for row in every if row["legal"] and row["fit"] != "does not fit"]
        assert [row[key] for row in rows] == sorted(row[key] for row in rows)
        assert all(row["speed_known"] == "predicted" for row in rows)
        orders[by] = [row["recipe"] for row in rows]
    assert orders["time"] != orders["memory"]
    first = json.loads(cli("recommend", *where, "--by", "time", "--runs", tmp_path))["recipes"][0]
    assert (first["recipe"], first["seconds"]) == ("bf16_mixed", 0.001)
    assert first["speed_known"].startswith("measured in")


@pytest.mark.parametrize("by", ["status", "time"])
def test_recipes_that_fit_stand_before_those_that_are_tight(by, cli):
    where = ["--config", "deepseek_v3_671b", "--target", "h100", "--world-size", "2048"]
    printed = cli("recommend", *where, "--by", by, "--json")
    found = [row["fit"] for row in json.loads(printed)["recipes"] if row["legal"]]
    assert [kind for kind, _ in itertools.groupby(found)] == ["fits", "tight", "does not fit"]


def test_fewer_than_one_layout_is_refused(cli):
    policy, facts = facts_of("gpt_tiny", 1)
    for most in (0, -1):
        with pytest.raises(BadValue, match="expected at least 1"):
            search(policy, facts, H100, most=most)
        assert f"--most {most}: expected at least 1" in cli("layouts --target h100 --most", most, code=2)


def test_no_two_layouts_of_the_list_differ_in_stages_alone_and_take_as_long():
    target = machine("gb300")
    run = ConfigContainer.load("configs/llama3_70b.yaml").resolved(64, machine=target, versions=ASSUMED, training=False)
    found = search(run.policy, dataclasses.replace(run.facts, environment={}), target, most=6)
    pairs = [pair for pair in itertools.combinations(found, 2) if len({without_stages(one.run) for one in pair}) == 1]
    assert pairs  # those that differ by more are listed
    assert all(other.seconds >= 1.03 * one.seconds for one, other in pairs)


def without_stages(run):
    return run.parallel.tensor, run.parallel.expert, run.micro_batch_size / run.parallel.context


def test_published_numbers_of_virtual_stages_are_considered():
    policy, facts = facts_of("llama3_70b", 64, "train.global_batch_size=128")
    sizes = [run.parallel for run in everything(policy, facts, H100)]
    virtual = {one.virtual_pipeline or 1 for one in sizes if one.pipeline == 4}
    assert virtual == {1, 2, 4, 5, 10, 20}


@pytest.mark.parametrize(("config", "asked", "said"), [
    ("gpt_tiny", ["model.fp16_lm_cross_entropy=true"], "fp16-cross-entropy: fp16_lm_cross_entropy with bf16 compute"),
    ("llama3_405b", [], "weights and gradients alone exceed the memory of 8 x H100"),
    ("gpt_tiny", ["train.global_batch_size=7", "--world-size", "64"], "sizes must divide 64 GPUs"),
], ids=["a rule", "memory", "sizes"])  # fmt: skip
def test_what_refuses_every_layout_is_named(config, asked, said, cli):
    where = ["layouts", "--config", config, "--target", "h100", "--world-size", "8", *asked]
    assert said in cli(*where, code=1)
    assert said in json.loads(cli(*where, "--json", code=1))["refused"][0]


@pytest.mark.parametrize("own", ["tensor_model_parallel_size=3", "pipeline_model_parallel_size=3", "context_parallel_size=2"])  # fmt: skip
def test_the_layout_that_is_replaced_is_no_reason(own, cli):
    asked = ["layouts", "--config", "gpt_tiny", "--target", "h100", "--world-size", "8", "--most", "1", "--json"]
    (one,) = json.loads(cli(*asked, f"parallel.{own}", "train.global_batch_size=7"))["layouts"]
    assert "tensor_model_parallel_size=2 parallel.pipeline_model_parallel_size=4" in one["changes"]


def test_recipes_that_the_band_does_not_tell_apart_are_tied(cli):
    where = ["recommend", "--config", "llama3_8b", "--target", "h100", "--world-size", "8", "--by", "time"]
    answer = json.loads(cli(*where, "--json"))
    rows = [row for row in answer["recipes"] if row["legal"] and row["seconds"]]
    most = rows[0]["seconds"] * (1 + rows[0]["band"])
    assert {row["tied"] for row in rows} == {True, False}
    assert all(row["tied"] == (row["seconds"] <= most) for row in rows)
    said = " ".join(cli(*where).split())
    assert f"{sum(row['tied'] for row in rows)} recipes lie within the error band of the fastest" in said
    assert answer["ties"]
    assert all(" ".join(tie.split()) in said for tie in answer["ties"])
    slower = [row for row in rows if row["tie"] == 2]  # than the band allows, and no more apart than it
    assert len(slower) > 1
    assert most < slower[0]["seconds"] <= slower[-1]["seconds"] <= slower[0]["seconds"] * (1 + slower[0]["band"])
    assert f"tied (==): the predicted steps of {len(slower)} recipes" in said
    least = min((row for row in rows if row["tied"]), key=lambda row: row["bytes"])
    assert least["recipe"] in said.partition("memory: least: ")[2].partition(";")[0]


def test_a_machine_of_unknown_memory_refuses_no_layout(file, cli):
    path = file("m.yaml", MACHINE)
    assert "that of here is unknown" in cli("layouts --machine-file", path, "--most", "1")


def distributed(one):
    return dict(word.split("=", 1) for word in shlex.split(one["settings"]))["ddp.use_distributed_optimizer"]


def test_the_optimizer_is_looked_at_both_ways_unless_the_file_says_which(cli):
    policy, facts = facts_of("gpt_tiny", 4)
    for stated, ways in ((False, {False, True}), (True, {False})):
        every = itertools.chain(*families(policy, facts, H100, stated=stated))
        assert {run.optimizer.distributed for run in every} == ways
    start = ["layouts", "--target", "h100", "--world-size", "4", "--most", "40", "--json"]
    for said, ways in (((), {"true", "false"}), (("ddp.use_distributed_optimizer=false",), {"false"})):
        assert {distributed(one) for one in json.loads(cli(*start, *said))["layouts"]} == ways


@pytest.mark.parametrize("more", [["--recipes", "full_bf16"], ["--engine", "fsdp2"]], ids=lambda more: more[1])
def test_what_cannot_distribute_the_optimizer_has_layouts_without_it(more, cli):
    found = json.loads(cli("layouts --target h100 --world-size 4 --json", *more))["layouts"]
    assert {distributed(one) for one in found} == {"false"}


def test_a_recipe_of_the_list_that_is_not_there_is_named_and_one_that_is_twice_counts_once(cli):
    for more in ([], ["--json"]):
        assert "nope" in cli("layouts --target h100 --recipes bf16_mixed,nope", *more, code=2)
    # an H100 cannot run the last
    found = json.loads(cli("layouts --target h100 --recipes bf16_mixed,bf16_mixed,nvfp4 --json"))["layouts"]
    assert {one["recipe"] for one in found} == {"bf16_mixed"}
    assert len(found) == len({one["settings"] for one in found})


def test_a_line_names_what_differs_also_where_the_files_batch_does_not_divide_the_world(cli):
    printed = cli("layouts --config gpt_oss_120b --target h100 --world-size 4096 --most 1")
    (line,) = (line for line in printed.splitlines() if line.startswith("1: "))
    assert "parallel.tensor_model_parallel_size=" in line
    assert "pipeline_model_parallel_layout" not in line


def test_a_search_asks_no_bytes_of_what_a_known_rule_forbids(monkeypatch):
    policy, facts = facts_of("nemotron_3_super", 64)
    counted = search(policy, facts, H100, most=2, refused=Counter())
    asked = []
    exceeds = FamilyBounds.exceeds
    monkeypatch.setattr(FamilyBounds, "exceeds", lambda self, run, most: asked.append(run) or exceeds(self, run, most))
    assert counted == search(policy, facts, H100, most=2)
    # megatron-core's hybrids have no virtual stages: the first family's last member, whose recomputation the same rule forbids, made it known
    assert asked
    assert not [run for run in asked if run.parallel.virtual_pipeline]


@pytest.mark.parametrize("name", ["llama3_8b", "qwen3_30b_a3b", "nemotron_3_nano"])
def test_a_search_that_counts_refusals_finds_the_same_layouts(name):
    policy, facts = facts_of(name, 32)
    counted = search(policy, facts, H100, most=4, refused=Counter())
    assert counted == search(policy, facts, H100, most=4)
    assert counted
    below = {"most": 4, "below": 1.2 * counted[0].seconds}
    assert search(policy, facts, H100, **below, refused=Counter()) == search(policy, facts, H100, **below)


def test_a_search_below_a_time_looks_at_nothing_slower(monkeypatch):
    policy, facts = facts_of("llama3_8b", 16)
    best, priced = search(policy, facts, H100, most=1)[0].seconds, []
    monkeypatch.setattr(_Pool, "price", lambda self, run, *_: priced.append(run))
    assert not search(policy, facts, H100, most=1, below=best / 2)
    assert not priced
