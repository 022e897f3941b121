"""A schedule of recipes before its run: each stage is judged alone, the answer is the worst one's, and `train` says the same."""

from __future__ import annotations

import json

import pytest

from mpbridge.common.errors import Refused
from mpbridge.numerics.certificates.certificate import Certificate
from mpbridge.settings.container import ConfigContainer
from mpbridge.training.checkpoint.continuation import consent, of_run
from mpbridge.training.checkpointer import check_stages
from tests.light import loaded_by

H100 = ("--config", "llama3_8b", "--target", "h100", "train.train_iters=100")


def schedule(*recipes: str, until: str = "50%") -> str:
    """Of two stages, each a recipe or the inside of a mapping."""
    first, second = (one if ":" in one else f"recipe: {one}" for one in recipes)
    return f"mixed_precision=[{{{first}, until: {until}}}, {{{second}}}]"


@pytest.fixture
def ask(cli):
    """A verb's answer as JSON, whatever its exit code."""
    return lambda *words: json.loads(cli("", *words, "--json", code=(0, 1)))


FP8_WITHOUT_GATHER = "recipe: bf16_with_fp8_delayed_scaling_mixed, fp8_param_gather: false"
PAIRS = {
    "emulated FP8 behind BF16": (("bf16_mixed", "fp8_cs"), ["emulate=true", "ddp.use_distributed_optimizer=true"], True),
    "BF16 behind emulated FP8": (("fp8_cs", "bf16_mixed_bf16_moments"), ["emulate=true"], True),
    "a second stage that brings the distributed optimizer along": (("bf16_mixed", "bf16_mixed_bf16_moments"), [], True),
    "a first stage that does": (("bf16_mixed_bf16_moments", "full_bf16"), [], True),
    "states by FusedAdam behind torch's": (("fp32_params_bf16_compute", "bf16_params_fp32_states"), ["engine=fsdp2"], True),
    "an amax history that is lost": ((FP8_WITHOUT_GATHER, "bf16_mixed"), ["emulate=true"], True),
    "a rule that the second stage breaks": (("fp32", "full_bf16"), ["ddp.use_distributed_optimizer=true"], False),
    "a rule that the first stage breaks": (("full_bf16", "fp32"), ["ddp.use_distributed_optimizer=true"], False),
    "a machine that lacks the second": (("bf16_mixed", "nvfp4"), [], False),
    "a machine that lacks the first": (("nvfp4", "bf16_mixed"), [], False),
    "states that do not survive": (("bf16_mixed", 'recipe: bf16_mixed, frozen: ["embedding.*"]'), [], False),
}  # fmt: skip


@pytest.mark.parametrize(("recipes", "settings", "valid"), PAIRS.values(), ids=PAIRS)
def test_check_and_train_agree_on_a_schedule(ask, recipes, settings, valid):
    settings = [schedule(*recipes), "train.train_iters=4", *settings]
    answer = ask("check", *settings)
    assert ("valid" not in answer["objections"]) is valid, answer["violations"]
    made = ConfigContainer.load("configs/gpt_tiny.yaml", settings).resolved()
    if valid:
        assert len(check_stages(made)) >= 3
    else:
        with pytest.raises(Refused):
            check_stages(made)


def test_a_schedule_is_as_full_as_its_fullest_stage_which_is_named(ask, cli):
    words = schedule("bf16_mixed_bf16_moments", "bf16_mixed"), *H100
    answer, held = ask("check", *words), ask("memory", *words)
    alone = [ask("memory", "--recipe", name, *H100) for name in ("bf16_mixed_bf16_moments", "bf16_mixed")]
    assert [one["fit"]["answer"] for one in alone] == ["fits", "does not fit"]
    assert [row["needed"] for row in answer["schedule"]] == [one["needed"] for one in alone]
    assert answer["schedule"] == held["schedule"]
    assert answer["fit"]["needed"] == held["needed"] == alone[1]["needed"]
    assert [row["fullest"] for row in held["schedule"]] == [False, True]
    assert held["roles"] == alone[1]["roles"]
    assert answer["verdict"] == held["verdict"]
    assert "does not fit on H100 in stage 2 (bf16_mixed): 88.8" in answer["verdict"]
    assert "stage 2 (bf16_mixed), 88.8" in cli("check", *words, code=1)


@pytest.mark.parametrize(
    ("until", "settings", "share"),
    [("90%", [], 0.9), ("90%", ["train.train_iters=null"], 0.9), ("25", [], 0.25), ("25", ["train.train_iters=null"], None)],
)  # fmt: skip
def test_a_schedules_step_is_the_mean_of_its_stages(ask, until, settings, share):
    fast, slow = (ask("estimate", "--recipe", name, *H100) for name in ("fp8_cs", "bf16_mixed"))
    assert fast["seconds"] < slow["seconds"]
    made = ask("estimate", schedule("fp8_cs", "bf16_mixed", until=until), *H100, *settings)
    seconds = slow["seconds"] if share is None else share * fast["seconds"] + (1 - share) * slow["seconds"]
    assert made["seconds"] == pytest.approx(seconds)
    assert made["seconds"] == pytest.approx(sum(made["parts"].values()))
    # as many tokens a step in every stage
    tokens = slow["tokens_per_second_per_gpu"] * slow["seconds"]
    assert made["tokens_per_second_per_gpu"] * made["seconds"] == pytest.approx(tokens)
    assert slow["share_of_peak"] >= made["share_of_peak"] >= fast["share_of_peak"]
    assert [row["share"] for row in made["schedule"]] == [share, None if share is None else pytest.approx(1 - share)]
    assert made["because"].startswith("the slowest stage, " if share is None else "the mean over the stages; ")


def test_verbs_name_the_recipes_of_a_schedule_alike(ask):
    words = schedule("bf16_mixed_bf16_moments", "bf16_mixed", until="25"), *H100
    answers = [ask(verb, *words) for verb in ("check", "memory", "estimate")]
    answers += ask("layouts", *words, "--world-size", "8", "--most", "1")["layouts"]
    assert [one["recipe"] for one in answers] == ["bf16_mixed_bf16_moments, then bf16_mixed"] * 4


def test_what_refuses_a_stage_names_it(ask, cli):
    words = schedule("bf16_mixed", "nvfp4"), *H100
    named = "stage 2 (bf16_with_nvfp4_mixed): H100 (sm_90) cannot run this recipe"
    assert named in cli("estimate", *words, code=1, error=True)
    (why,) = ask("layouts", *words, "--world-size", "8")["refused"]
    assert named in why
    assert named in ask("check", *words)["undecided"]["time"]
    # what all of them break is no stage's
    odd = cli("memory", *words, "parallel.pipeline_model_parallel_size=3", code=1, error=True)
    assert "layers-do-not-divide" in odd
    assert "stage 1 (" not in odd
    assert cli("estimate", words[0], "--target", "cpu", code=2, error=True).startswith("CPU has no rates")


def test_layers_in_high_precision_are_so_in_every_stage(ask):
    nvfp4 = "recipe: nvfp4, first_last_layers_bf16: true, num_layers_at_start_in_bf16: {}, num_layers_at_end_in_bf16: 0"
    for stages in (
        (nvfp4.format(1), nvfp4.format(2)),
        (nvfp4.format(2), nvfp4.format(1)),
        ("bf16_mixed", nvfp4.format(1)),
    ):
        assert ask("check", schedule(*stages), "train.train_iters=4")["bf16_layers"] == [0]


@pytest.mark.parametrize("until", [("90%", "50%"), ("90%", "90%"), (50, 40), ("90%", "soon", "50%")])
def test_ends_that_no_length_orders_are_refused_without_one(cli, until):
    stages = [f"{{recipe: bf16_mixed, until: {end}}}" for end in until]
    words = f"mixed_precision=[{', '.join(stages)}, bf16_mixed]", "optimizer.nope=1"
    for length, order in (
        ("null", "give each stage a later `until` than the one before it"),
        ("100", f"bf16_mixed until {until[-1]} ends at step"),
    ):
        said = cli("check", *words, f"train.train_iters={length}", code=2)
        assert order in said
        assert "no setting in optimizer named 'nope'" in said
        assert said.count("'soon'") == until.count("soon")


def test_certify_says_which_recipe_it_takes(ask, monkeypatch):
    monkeypatch.setattr("mpbridge.numerics.certificates.certificate.certificate", lambda recipe, *_, **__: Certificate(recipe=recipe, te="2.11"))  # fmt: skip
    found = ask("certify", schedule("bf16_mixed", "nvfp4"))
    assert "only the first of 2 recipes is certified, bf16_mixed" in found["sentences"]["schedule"]
    assert ask("certify", "nvfp4")["sentences"] == {}


def test_what_a_schedule_may_break_is_a_listed_rule(ask):
    words = schedule("bf16_mixed", 'recipe: bf16_mixed, frozen: ["embedding.*"]'), *H100
    listed = {row["id"]: row for row in ask("check", "--rules")["rules"]}
    (lost, *_) = ask("check", *words)["violations"]
    assert listed[lost["rule"]] == {name: lost[name] for name in ("severity", "expected", "source")} | {"id": "stage-loses-the-optimizer-states", "holds": ""}  # fmt: skip


def test_the_nearest_layout_of_the_fullest_stage_may_not_hold_another(cli):
    sizes = (
        "model.num_layers=24",
        "model.hidden_size=4096",
        "model.num_attention_heads=32",
        "model.ffn_hidden_size=16384",
    )
    said = cli("memory", schedule("fp32", "full_bf16"), *sizes, "--target", "h100", code=1, joined=True)
    assert "nearest layout in which stage 1 (fp32) alone fits, on 2 GPUs: " in said
    assert "the whole run there: not valid: 1 error (full-16-bit-with-distributed-optimizer)" in said
    assert "nearest layout that fits" in cli(
        "memory", schedule("bf16_mixed_bf16_moments", "bf16_mixed"), *H100, code=1, joined=True
    )


def test_what_a_later_stage_overrides_is_shown(ask, cli):
    words = schedule("bf16_mixed", "full_bf16"), "ddp.grad_reduce_in_fp32=true"
    found = cli("plan", *words, "--on-conflict", "error", code=1)
    assert "ddp.grad_reduce_in_fp32" in found.partition("stage 2: full_bf16")[2]
    assert "ddp.grad_reduce_in_fp32" not in found.partition("stage 2: full_bf16")[0]
    assert [len(one["writes"]) for one in ask("plan", *words)["stages"]] == [6, 6]
    (note,) = (note for note in ask("check", *words)["notes"] if "grad_reduce_in_fp32" in note)
    assert note.startswith("stage 2 (full_bf16): overridden: ddp.grad_reduce_in_fp32: was true, becomes false")
    assert "grad_reduce_in_fp32" in cli(
        "train", *words, "train.train_iters=4", "--on-conflict", "error", code=1, error=True
    )


def test_a_job_whose_second_stage_fails_is_not_queued(cli):
    words = ["optimizer.lr=1e-3", "train.train_iters=4", "checkpoint.save=kept", "ddp.use_distributed_optimizer=true"]
    job = ("launch", "--cpu", "--nodes", "1", "--gpus-per-node", "2", "--", "train")
    assert "stage 2 (full_bf16): error" in cli(*job, schedule("fp32", "full_bf16"), *words, code=1, error=True)
    assert "torch.distributed.run" in cli(*job, schedule("fp32", "bf16_mixed"), *words)


def test_other_layouts_hold_every_stage(ask):
    words = schedule("bf16_mixed_bf16_moments", "bf16_mixed"), *H100
    answer = ask("check", *words)
    assert answer["others"]
    for other in answer["others"]:
        changed = ask("check", *words, *other["settings"].split())
        assert (changed["ok"], changed["fit"]["needed"]) == (True, other["fit"]["needed"])
    wide = "--world-size", "8"
    (best, *_) = ask("layouts", *words, *wide)["layouts"]
    assert ask("check", *words, *wide, *best["settings"].split())["fit"]["needed"] == best["needed"]


def test_layouts_of_a_schedule_do_not_need_the_places_of_its_layers(ask):
    placed = "parallel.pipeline_model_parallel_size=2", "model.num_layers_in_first_pipeline_stage=15"
    words = schedule("bf16_mixed", "fp8_cs"), *H100, "--world-size", "8"
    free, bound = (ask("layouts", *words, *more)["layouts"] for more in ((), placed))
    assert [one["needed"] for one in bound] == [one["needed"] for one in free] != []
    assert "model.num_layers_in_first_pipeline_stage=null" in bound[0]["changes"]


def test_layouts_of_stages_that_do_not_follow_each_other_say_so(ask):
    words = schedule("bf16_mixed", 'recipe: bf16_mixed, frozen: ["embedding.*"]'), *H100, "--world-size", "8"
    found = ask("layouts", *words)
    assert found["layouts"] == []
    (why,) = found["refused"]
    assert "from stage 1 to 2 (bf16_mixed -> bf16_mixed): other parameters are trained" in why


def test_a_checkpoint_of_any_stage_needs_no_consent():
    list_, *alone = (
        ConfigContainer.load("configs/gpt_tiny.yaml", [f"mixed_precision={one}", "train.train_iters=4"]).resolved()
        for one in (schedule("fp32", "bf16_mixed_bf16_moments").partition("=")[2], "fp32", "bf16_mixed_bf16_moments", "bf16_mixed")
    )  # fmt: skip
    for run in list_.by_stage():
        assert [bool(consent(of_run(saved), run)) for saved in alone] == [False, False, True]


def test_simulate_says_that_it_builds_the_first_recipe_alone(ask):
    words = "--config", "configs/gpt_tiny.yaml", "--ranks", "0", "train.train_iters=4"
    assert (
        "only the first of 2 recipes (--recipe builds another)"
        in ask("simulate", schedule("bf16_mixed", "fp32"), *words)["changed"]
    )


def test_a_schedule_is_judged_without_torch():
    words = ["check", schedule("bf16_mixed", "fp8_cs"), *H100]
    assert loaded_by(f"from mpbridge.cli.main import main\nassert main({words!r}) == 1") == []
