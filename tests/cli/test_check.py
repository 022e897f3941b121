"""`check` is one answer: its parts are what `memory`, `estimate`, `layouts` and `recommend` print, and none of them contradicts another."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from mpbridge.cli.main import main

CASES = {
    "does not fit": ("llama3_70b", "fp8_cs", "h100", "32"),
    "fits": ("llama3_8b", "bf16", "h100", "64"),
    "tight": ("llama3_8b", "fp8_cs", "b200", "2"),
    "is not valid": ("llama3_8b", "mxfp8", "h100", "8"),
    "experts": ("qwen3_30b_a3b", "mxfp8", "b200", "16"),
    "other engine": ("llama3_8b", "bf16_params_fp32_states", "h100", "8"),
    "unknown memory": ("llama3_8b", "fp8_cs", "sm_90", "8"),
}


@pytest.fixture
def ask(capsys):
    def call(*words):
        code = main([*words, "--json"])
        out = capsys.readouterr()
        return code, json.loads(out.out or out.err)

    return call


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_part_contradicts_another(ask, case):
    config, recipe, target, world = case
    words = ["--config", config, "--target", target, "--world-size", world]
    code, answer = ask("check", *words, "--recipe", recipe)
    held_code, held = ask("memory", *words, "--recipe", recipe)
    time_code, time = ask("estimate", *words, "--recipe", recipe)
    assert code == (1 if answer["objections"] else 0) == (0 if answer["ok"] else 1)
    assert held["verdict"] == answer["verdict"]
    assert held_code == code
    if answer["fit"]:
        assert answer["fit"]["needed"] == held["needed"] == sum(answer["fit"]["parts"].values())
    else:
        assert "fits" in answer["undecided"]
    if time_code == 0:
        assert (time["seconds"], time["verdict"]) == (answer["time"]["seconds"], answer["verdict"])
    else:
        assert answer["undecided"]["time"] == time["message"]
    _, ranked = ask("recommend", *words, *(["--engine", answer["engine"]] if answer["engine"] != "mcore" else []))
    (row,) = (one for one in ranked["recipes"] if one["recipe"] == answer["recipe"])
    assert row["legal"] == ("valid" not in answer["objections"])
    if row["legal"] and answer["fit"]:
        assert (row["fit"], row["bytes"]) == (answer["fit"]["answer"], answer["fit"]["needed"])


LORA = """extends: llama3_8b
mixed_precision: {recipe: fp8_blockwise, frozen: ["*"], lora_dtype: fp32}
model: {lora_rank: 16}
parallel: {tensor_model_parallel_size: 1, sequence_parallel: false}
"""


def test_every_verb_compares_with_the_same_frozen_base(ask, tmp_path):
    path = tmp_path / "lora.yaml"
    path.write_text(LORA)
    words = ["--config", str(path), "--target", "h100"]
    _, ranked = ask("recommend", *words)
    held = {}
    for one in ranked["recipes"]:
        if one["recipe"] in (
            "bf16_mixed",
            "bf16_with_fp8_subchannel_scaling_mixed",
            "bf16_with_fp8_current_scaling_mixed",
        ):
            held[one["recipe"]] = ask("memory", *words, "--recipe", one["recipe"])[1]
            assert one["bytes"] == held[one["recipe"]]["needed"]
    _, mine = ask("memory", *words)
    assert mine["reference"]["roles"] == held["bf16_mixed"]["roles"]
    assert mine["roles"]["grads"] == mine["reference"]["roles"]["grads"], "no recipe gives a frozen base gradients"
    assert held["bf16_mixed"]["needed"] < 80 * 2**30, "a full fine-tuning needs 177 GiB"
    _, plain = ask("estimate", *words, "--recipe", "bf16_mixed")
    assert ask("estimate", *words)[1]["reference"]["seconds"] == plain["seconds"]
    _, found = ask("layouts", *words, "--recipes", "bf16_mixed,fp8_blockwise")
    needed = {
        one["recipe"]: one["needed"] for one in reversed(found["layouts"]) if "micro_batch_size=" not in one["changes"]
    }
    assert needed == {name: held[name]["needed"] for name in ("bf16_mixed", "bf16_with_fp8_subchannel_scaling_mixed")}
    # so long that BF16 is tight, and another recipe is offered
    words += ["model.max_sequence_length=12288", "data.seq_length=12288"]
    _, answer = ask("check", *words, "--recipe", "bf16_mixed")
    (other,) = [one for one in answer["others"] if "--recipe" in one["settings"]]
    _, then = ask("check", *words, *shlex.split(other["settings"]))
    assert then["fit"]["needed"] == other["fit"]["needed"]


def test_stages_that_freeze_differently_are_compared_with_what_the_fullest_one_trains(ask, tmp_path):
    path = tmp_path / "stages.yaml"
    stages = "[{recipe: fp8_blockwise, frozen: ['*'], until: 50%}, {recipe: bf16_mixed}]"
    path.write_text(
        LORA.replace('{recipe: fp8_blockwise, frozen: ["*"], lora_dtype: fp32}', stages) + "train: {train_iters: 8}\n"
    )
    _, mine = ask("memory", "--config", str(path), "--target", "h100")
    assert mine["reference"]["roles"]["grads"] == mine["roles"]["grads"]


VIRTUAL = "parallel.virtual_pipeline_model_parallel_size=3"


@pytest.mark.parametrize(
    ("words", "gains"),
    [
        # full recomputation would fit, but a hybrid does not follow it: on more GPUs
        (["nemotron_h_8b", "--target", "h100"], ["fits", "fits"]),
        (["llama3_8b", "--target", "h100", "--world-size", "8", VIRTUAL], ["valid, fits", "valid, fits"]),
        (["llama3_405b", "--target", "h100"], None),
    ],
    ids=["a hybrid", "not valid", "large"],
)
def test_what_is_offered_instead_is_valid_and_holds_less_unless_it_fits(ask, words, gains):
    _, answer = ask("check", "--config", *words)
    assert answer["others"]
    assert gains is None or [one["gains"] for one in answer["others"]] == gains
    for other in answer["others"]:
        code, then = ask("check", "--config", *words, *shlex.split(other["settings"]))
        assert code == 0, then
        assert (then["fit"]["answer"], then["fit"]["needed"]) == (other["fit"]["answer"], other["fit"]["needed"])
        if "valid" not in answer["objections"] and then["fit"]["answer"] == "tight":
            assert then["fit"]["needed"] < answer["fit"]["needed"]


@pytest.mark.parametrize("case", ["does not fit", "fits"])
def test_what_it_would_rather_run_is_what_it_says_once_it_is_taken(ask, case):
    config, recipe, target, world = CASES[case]
    words = ["check", "--config", config, "--target", target, "--world-size", world]
    _, answer = ask(*words, "--recipe", recipe)
    assert 1 <= len(answer["others"]) <= 3
    for other in answer["others"]:
        taken = shlex.split(other["settings"])
        chosen = [] if "--recipe" in taken else ["--recipe", recipe]
        code, then = ask(*words, *chosen, *taken)
        assert code == 0
        assert (then["fit"]["needed"], then["time"]["seconds"]) == (other["fit"]["needed"], other["time"]["seconds"])
        assert then["fit"]["answer"] == other["fit"]["answer"] != "does not fit"
        if answer["ok"]:
            assert then["time"]["seconds"] < answer["time"]["seconds"], "it was offered because it is faster"
            assert other["gains"].startswith(f"{answer['time']['seconds'] / then['time']['seconds']:.2f} times")


# moe_tiny gives each rank its whole share of the batch, which is another one where ranks are split otherwise; hybrids have no virtual stages
@pytest.mark.parametrize(
    ("config", "recipe", "world"),
    [("llama3_70b", "fp8_cs", "32"), ("moe_tiny", "fp16", "2"), ("nemotron_3_nano", "bf16", "32")],
)
def test_a_layouts_line_is_what_check_says_of_it(ask, config, recipe, world):
    words = ["--config", config, "--recipe", recipe, "--target", "h100", "--world-size", world]
    found = ask("layouts", *words, "--most", "3")[1]["layouts"]
    assert [one["answer"] for one in found] == sorted(one["answer"] for one in found)  # fits before tight
    for one in found:
        code, then = ask("check", *words, *shlex.split(one["changes"]))
        assert code == 0
        assert (then["fit"]["needed"], then["fit"]["answer"]) == (one["needed"], one["answer"])
        assert then["time"]["seconds"] == pytest.approx(one["seconds"])


def test_everything_that_was_not_said_is_named_with_the_word_that_sets_it(ask, tmp_path):
    _, nothing = ask("check")
    said = {row["what"]: row["set_by"] for row in nothing["assumed"]}
    assert said == {"configuration": "--config FILE", "machine": "--target GPU", "processes": "--world-size 2"}
    (tmp_path / "bare.yaml").write_text(
        "model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 384}\ndata: {seq_length: 64}"
    )
    _, some = ask("check", "--config", str(tmp_path / "bare.yaml"), "--recipe", "bf16", "--target", "h100")
    wanted = {"processes", "versions there", "micro batch size", "global batch size"}
    assert {row["what"] for row in some["assumed"]} == wanted
    versions = ["--torch", "2.11", "--mcore", "0.16.1", "--te", "2.11", "--cuda", "13.0"]
    words = ["--config", "llama3_8b", "--recipe", "bf16", "--target", "h100", "--world-size", "8"]
    _, most = ask("check", *words, *versions)
    assert [row["what"] for row in most["assumed"]] == ["versions there"]  # torchao, which no option sets
    assert "torchao" in most["assumed"][0]["value"]


def test_the_screen_of_the_issues_example(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    lines = cli("check --config llama3_70b --recipe fp8_cs --target h100", code=1).splitlines()
    assert len(lines) <= 40
    for start in ("valid  yes", "fits   no", "time   ", "verdict  no: does not fit on H100"):
        assert any(line.startswith(start) for line in lines), start


KINDS = ("gpt_tiny", "llama3_405b", "nemotron_h_8b", "qwen3_30b_a3b")
SCREENS = [
    pytest.param(path.stem, "fp8_cs", "h100", marks=() if path.stem in KINDS else pytest.mark.slow)
    for path in sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
]
"""One of each kind of model; the rest of the configurations are slow."""


@pytest.mark.parametrize(
    ("config", "recipe", "target"),
    [*SCREENS, ("deepseek_v3_671b", "mxfp8", "b200"), ("gpt_oss_120b", "nvfp4", "b200")],
    ids=str,
)
def test_every_shipped_configuration_has_its_answer_on_one_screen(cli, monkeypatch, config, recipe, target):
    monkeypatch.setenv("COLUMNS", "100")
    lines = cli("check --config", config, "--recipe", recipe, "--target", target, code=(0, 1)).splitlines()
    # what is wrong has lines of its own
    faults = [n for n, line in enumerate(lines) if line.startswith(("error: ", "warning: "))]
    wrong = lines.index("", faults[-1]) - faults[0] + 1 if faults else 0
    assert len(lines) - wrong <= 40


def test_a_layout_that_sets_what_the_first_sets_is_shown_by_what_differs(ask, cli):
    words = ["check", "--config", "deepseek_v3_671b", "--recipe", "fp8_cs", "--target", "h100"]
    first, second = (one["settings"].split() for one in ask(*words)[1]["others"][:2])
    more = cli(*words).split("the first, then ")[1].splitlines()[0].split()
    setting = {word.partition("=")[0]: word for word in [*first, *more]}  # the last of two counts
    assert sorted(setting.values()) == sorted(second)
    assert len(more) < len(second)


def test_layers_that_alternate_are_counted_and_listed_in_json(ask, cli):
    words = [
        "check", "--config", "nemotron_nano_v2_12b", "--recipe", "nanov2_bf16_with_fp8_current_scaling_mixed",
        "--target", "h100", "--world-size", "64",
    ]  # fmt: skip
    _, answer = ask(*words)
    assert [len(one["layers"]) for one in answer["sizes"]] == [26]
    assert "26 of 2-58" in cli(*words)


def test_sizes_with_one_cure_are_one_row_of_the_screen(ask, cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    words = ["check", "--config", "deepseek_v3_671b", "--recipe", "mxfp8", "--target", "b200", "--world-size", "1024"]
    _, answer = ask(*words)
    cures = [one["cure"] for one in answer["sizes"]]
    assert len(set(cures)) < len(cures)
    shown = " ".join(cli(*words).split())
    assert [shown.count(cure) for cure in set(cures)] == [1] * len(set(cures))
    assert all(one["module"] in shown for one in answer["sizes"])
