"""Fingerprints and verdicts; the table over all pairs of recipes is in golden/resume_verdicts.txt (run this file as a script to write it anew)."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from mpbridge.cli import resume_check
from mpbridge.common.errors import CheckpointError
from mpbridge.common.facts import ModelShape, OptimizerFacts, Parallel, RunFacts, Versions
from mpbridge.common.files import write_whole
from mpbridge.precision.registry import get_mixed_precision_config, recipes
from mpbridge.precision.resolve import resolve
from mpbridge.settings.container import ConfigContainer
from mpbridge.training.checkpoint import store
from mpbridge.training.checkpoint.continuation import of_run
from mpbridge.training.checkpoint.verdict import FILE, Fingerprint, fingerprint, learned, read_fingerprint, verdict
from tests.light import loaded_by

GOLDEN = Path(__file__).parents[2] / "golden" / "resume_verdicts.txt"
LETTER = {"same": "=", "safe": "s", "lossy": "L", "weights only": "w", "refused": "X"}
SHAPE = ModelShape(
    num_layers=32, hidden_size=64, num_attention_heads=4, ffn_hidden_size=256, num_query_groups=4, kv_channels=16, vocab_size=320, seq_length=64
)  # fmt: skip
FACTS = RunFacts(
    shape=SHAPE,
    optimizer=OptimizerFacts(distributed=True),
    model={"hidden_dropout": 0.0, "attention_dropout": 0.0},
    versions=Versions(torch="2.13.0", megatron_core="0.16.1"),
)


def made(name: str, facts: RunFacts = FACTS, **optimizer) -> Fingerprint:
    return fingerprint(name, resolve(get_mixed_precision_config(name)), facts, optimizer)


def table() -> str:
    names = [name for name in recipes if recipes[name].engine is None]
    prints = {name: made(name) for name in names}
    width = max(map(len, names))
    legend = "rows: the checkpoint; columns: the run, in the same order. " + ", ".join(
        f"{letter} {kind}" for kind, letter in LETTER.items()
    )
    rows = [f"{a:<{width}}  {' '.join(LETTER[verdict(prints[a], prints[b]).kind] for b in names)}" for a in names]
    return "\n".join([legend, *rows]) + "\n"


def test_the_table_of_all_pairs_is_as_written():
    assert table() == GOLDEN.read_text()


def test_a_fingerprint_survives_json_and_is_the_same_as_itself():
    for name in recipes:
        one = made(name)
        again = Fingerprint.from_data(json.loads(json.dumps(one.as_data())))
        assert again == one
        assert verdict(one, again).kind == "same"


@pytest.mark.parametrize("engine", ["mcore", "fsdp2"])
def test_another_recipe_has_the_optimizer_that_a_run_of_its_own_would_have(engine):
    for name in recipes:
        sizes = {"num_layers": 16, "hidden_size": 64, "num_attention_heads": 4, "max_sequence_length": 32}
        run = ConfigContainer(mixed_precision=name, engine=engine, model=sizes).resolved(training=False)
        other = made("fp32").with_policy(resolve(get_mixed_precision_config(name)), name, engine)
        assert other.optimizer == run.facts.optimizer.name


DELAYED = "bf16_with_fp8_delayed_scaling_mixed"
AWARE = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}
Side = tuple[str, dict[str, Any], dict[str, Any]]
"""A recipe, what is another of FACTS, settings of the optimizer."""


def side(name: str = "bf16_mixed", *, aware: bool = False, shape: dict[str, Any] | None = None, **facts: Any) -> Side:
    return name, facts | ({"shape": dataclasses.replace(SHAPE, **shape)} if shape else {}), AWARE if aware else {}


def rotary(base: int) -> dict[str, Any]:
    return FACTS.model | {"rotary_base": base, "activation_func": "gelu"}


def updated_by(name: str, **settings: Any) -> OptimizerFacts:
    return OptimizerFacts(name=name, settings=settings)


BF16 = side()
COSTS: dict[str, tuple[Side, Side, str, str]] = {
    # another recipe
    "quantize": (BF16, side("bf16_with_fp8_current_scaling_mixed"), "safe", ""),
    "nvfp4 to bf16": (side("bf16_with_nvfp4_mixed"), BF16, "safe", ""),
    "history starts empty": (BF16, side(DELAYED), "safe", ""),
    "history lost": (side(DELAYED), BF16, "lossy", "lost: amax history of delayed scaling (1024 steps)"),
    "moments narrowed": (BF16, side("bf16_mixed_bf16_moments"), "lossy", "first moments: fp32 -> bf16"),
    "moments widened": (side("bf16_mixed_bf16_moments"), BF16, "safe", ""),
    "remainders lost": (side("bf16_mixed_bf16_moments"), side("full_bf16"), "lossy", "16 remainder bits"),
    "scaler lost": (side("fp16_mixed"), BF16, "lossy", "loss scale"),
    "a loss scale begins": (BF16, side("fp16_mixed"), "safe", "starts at 4.29497e+09: up to 33 steps are skipped"),
    "fp32 parameters become main weights": (side("fp32"), BF16, "safe", ""),
    "main weights narrowed": (side("fp32"), side("full_bf16"), "lossy", "main weights: fp32 -> bf16"),
    # another run
    "engine": (BF16, side(engine="fsdp2"), "refused", "keep engine=mcore"),
    "optimizer": (BF16, side(optimizer=updated_by("sgd")), "weights only", "optimizer.optimizer=adam"),
    "muon": (BF16, side(optimizer=updated_by("muon")), "weights only", "muon cannot use the states of adam"),
    "adapters begin": (BF16, side(shape={"lora_rank": 8, "lora_targets": ("mlp.*",)}), "weights only", "has no adapters"),
    "adapters left out": (side(shape={"lora_rank": 8}), BF16, "refused", "lora_rank is 8 in the checkpoint and 0"),
    "other adapters": (side(shape={"lora_rank": 8}), side(shape={"lora_rank": 4}), "refused", "lora_rank is 8"),
    "model": (BF16, side(shape={"hidden_size": 128}), "refused", "hidden_size is 64 in the checkpoint and 128"),
    "sequence length": (BF16, side(shape={"seq_length": 128}), "safe", "sequence length 64 -> 128"),
    "sequence length with learned positions": (side(shape={"learned_positions": True}), side(shape={"learned_positions": True, "seq_length": 128}), "refused", ""),
    "versions": (BF16, side(versions=Versions(torch="2.14.0", megatron_core="0.16.1")), "safe", "torch 2.13.0 -> 2.14.0"),
    "reshard": (BF16, side(parallel=Parallel(world_size=2)), "safe", "world_size 1 -> 2"),
    "reshard with dropout": (BF16, side(parallel=Parallel(world_size=2), model={"hidden_dropout": 0.1}), "lossy", "random states"),
    "realization": (BF16, side(realization="emulated"), "safe", "native -> emulated"),
    "history between emulation and Transformer Engine": (side(DELAYED, realization="emulated"), side(DELAYED), "lossy", ""),
    "the same weights in another model": (side(model=rotary(10000)), side(model=rotary(500000)), "safe", "the same weights in another model: rotary_base 10000 -> 500000"),
    "the same adapters with another factor": (side(model=FACTS.model | {"lora_alpha": 16.0}), side(model=FACTS.model | {"lora_alpha": 320.0}), "safe", "the same weights in another model: lora_alpha 16.0 -> 320.0"),
    "another scale of Muon's updates": (
        side(optimizer=updated_by("muon", muon_scale_mode="spectral")), side(optimizer=updated_by("muon", muon_scale_mode="shape_scaling")),
        "safe", "other updates: muon_scale_mode spectral -> shape_scaling",
    ),
    "narrower moments between two Adams": (
        side(engine="fsdp2", optimizer=updated_by("torch_adamw")), side(engine="fsdp2", optimizer=updated_by("adam"), aware=True), "lossy", "lost: bits of the first moments: fp32 -> bf16",
    ),
    "the optimizer's section of the checkpoint": (side(aware=True), BF16, "safe", ""),
    "the optimizer's section of the run": (BF16, side(aware=True), "lossy", ""),
    "the FSDP engines read each other": (side(engine="fsdp2", optimizer=updated_by("torch_adamw")), side(engine="megatron_fsdp"), "safe", ""),
    "FSDP2 to mcore": (side(engine="fsdp2"), BF16, "refused", ""),
}  # fmt: skip
"""Name -> the checkpoint, the run, the verdict and a part of its lines."""


@pytest.mark.parametrize("name", COSTS)
def test_what_a_change_costs(name):
    *sides, kind, said = COSTS[name]
    saved, wanted = (made(recipe, dataclasses.replace(FACTS, **facts), **more) for recipe, facts, more in sides)
    found = verdict(saved, wanted)
    assert found.kind == kind
    assert bool(found.lost) == (kind in ("lossy", "weights only"))
    assert said in "\n".join(found.lines())


def test_what_is_learned_from_then_on_changes_with_the_policy_alone():
    bf16, fp16, fp8 = made("bf16_mixed"), made("fp16_mixed"), made("fp16_with_fp8_delayed_scaling_mixed")
    assert learned(bf16, made("bf16_mixed")) == []
    assert learned(bf16, fp16)[1:] == ["up to 33 steps are skipped until the loss scale fits"]
    assert learned(fp16, fp8) == ["regions differ"], "the loss scale goes on"
    assert "lost: the dynamic loss scale and its counters" in learned(fp16, bf16)


@pytest.fixture
def checkpoint(tmp_path):
    partial = store.begin(tmp_path, 12)
    (partial / FILE).write_text(json.dumps(made("bf16_with_fp8_delayed_scaling_mixed").as_data()))
    for name in ("index.json", "state.json", "__0_0.distcp"):
        (partial / name).write_text('{"map": []}')
    return store.seal(partial, 12)


def _is_fifo(folder):
    (folder / store.MANIFEST).unlink()
    os.mkfifo(folder / store.MANIFEST)


def _negative(folder):
    manifest = json.loads((folder / store.MANIFEST).read_text()) | {"step": -6}
    write_whole(folder / store.MANIFEST, json.dumps(manifest))


def refusal(cli, folder):
    """What resume-check says of a folder that is no checkpoint; an OSError, which names the file too, would be no sentence of its own."""
    told = json.loads(cli("resume-check", folder, "--json", code=2))
    assert told["error"] == "CheckpointError", told
    return told["message"]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        pytest.param(lambda folder: (folder / store.MANIFEST).write_text("[" * 200_000), store.MANIFEST, id="brackets"),
        pytest.param(_is_fifo, store.MANIFEST, id="a pipe"),
        pytest.param(_negative, store.MANIFEST, id="negative step"),
        pytest.param(lambda folder: (folder / store.MANIFEST).unlink(), store.MANIFEST, id="no manifest"),
        pytest.param(lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing", id="no tensors"),
        pytest.param(lambda folder: (folder / "__0_0.distcp").write_text("{"), "__0_0.distcp has 1 bytes", id="cut"),
    ],
)
def test_the_verb_says_yes_only_to_a_checkpoint_that_is_there(checkpoint, damage, named, cli):
    damage(checkpoint)
    assert named in refusal(cli, checkpoint)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param([], 0, "same", id="own recipe"),
        pytest.param(["--recipe", "bf16_mixed"], 1, "needs a word: checkpoint.accept=", id="another"),
        pytest.param(["--recipe", "fsdp_adamw"], 1, "with engine=fsdp2: refused", id="another engine"),
        pytest.param(["--recipe", "bf16", "--json"], 1, '"kind": "lossy"', id="json"),
    ],
)
def test_the_verb_says_it(checkpoint, cli, arguments, code, said):
    for where in (checkpoint, checkpoint.parent):
        assert said in cli("resume-check", where, *arguments, code=code)


def test_another_recipe_goes_on_training_what_the_run_trains(tmp_path):
    config = get_mixed_precision_config("bf16_mixed").derive(frozen=("*",), lora_dtype="fp32")
    facts = dataclasses.replace(FACTS, shape=dataclasses.replace(SHAPE, lora_rank=8))
    saved = fingerprint("bf16_mixed", resolve(config), facts, {})
    wanted = resume_check.wanted_fingerprint(saved, "fp8_cs", None)
    assert (wanted.policy.frozen, wanted.policy.keep_fp32) == (saved.policy.frozen, saved.policy.keep_fp32)
    assert verdict(saved, wanted).kind == verdict(made("bf16_mixed"), made("fp8_cs")).kind
    (tmp_path / "mine.yaml").write_text("extends: fp8_cs\nfrozen: ['embedding.*']\n")
    wanted = resume_check.wanted_fingerprint(saved, str(tmp_path / "mine.yaml"), None)
    assert (wanted.policy.frozen, wanted.policy.keep_fp32) == (("embedding.*",), saved.policy.keep_fp32)


def test_weights_alone_are_a_yes_only_where_they_were_asked_for():
    sgd = dataclasses.replace(FACTS, optimizer=OptimizerFacts(name="sgd"))
    found = verdict(made("bf16_mixed"), made("bf16_mixed", sgd))
    assert [resume_check.exit_code(found, reset=reset) for reset in (False, True)] == [1, 0]


def test_the_verb_needs_no_framework(checkpoint):
    words = ["resume-check", str(checkpoint), "--recipe", "bf16_mixed"]
    assert loaded_by(f"from mpbridge.cli.main import main\nassert main({words}) == 1") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("{", "cannot be read", id="no json"),
        pytest.param("[]", "schema 'list'", id="a list"),
        pytest.param('{"schema": 99}', "schema 99", id="from the future"),
        pytest.param('{"schema": 1}', "KeyError", id="incomplete"),
        *(
            pytest.param(json.dumps(made("bf16_mixed").as_data() | {name: ["x"]}), f"{name}: expected a table", id=name)
            for name in ("shape", "parallel", "versions", "stored", "function", "optimizer_section")
        ),
    ],
)
def test_a_damaged_fingerprint_is_named(tmp_path, text, said):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(CheckpointError, match=said) as told:
        read_fingerprint(tmp_path)
    assert FILE in str(told.value)


@pytest.mark.parametrize("sizes", [None, {"mamba_num_heads": 8}])
def test_the_sizes_of_a_hybrid_under_their_former_name_are_read(sizes):
    data = made("bf16_mixed").as_data()
    data["shape"] = {name: value for name, value in data["shape"].items() if name != "sizes"} | {"mamba": sizes}
    assert Fingerprint.from_data(data).shape["sizes"] == (sizes or {})


def test_a_missing_checkpoint_is_named(tmp_path, cli):
    assert "without checkpoints" in refusal(cli, tmp_path)


def test_the_verb_asks_the_run_itself(tmp_path, monkeypatch, cli):
    """A checkpoint's own configuration with settings on top, or another configuration."""
    from mpbridge.training.checkpoint.format import encoded

    monkeypatch.chdir(tmp_path)
    small = ["model.num_layers=1", "train.train_iters=14"]
    run = ConfigContainer.load("gpt_tiny", small).resolved()
    partial = store.begin(tmp_path, 14)
    batch = int(run.train["global_batch_size"])
    own = {
        "max_lr": 0.002, "min_lr": 0.0002, "lr_warmup_steps": 20 * batch, "lr_decay_steps": 21 * batch,
        "lr_decay_style": "cosine", "init_lr": 0.0, "wsd_decay_steps": None, "lr_wsd_decay_style": "exponential",
    }  # fmt: skip
    (partial / "config.yaml").write_text(run.container.to_yaml())
    (partial / FILE).write_text(json.dumps(of_run(run).as_data()))
    (partial / "state.json").write_text(json.dumps(encoded({"run": {"scheduler": own}})))
    for name in ("index.json", "__0_0.distcp"):
        (partial / name).write_text("{}")
    folder = store.seal(partial, 14)
    cases = {
        "train.train_iters=14": None, "train.train_iters=100": "scheduler.lr_decay_iters=21;", "scheduler.lr_decay_iters=21 train.train_iters=100": None,
        "train.train_iters=100 scheduler.override_opt_param_scheduler=true": None, "optimizer.lr=1e-3": "optimizer.lr=0.002;",
        "mixed_precision=fp32": "checkpoint.accept=bf16_mixed", "mixed_precision=fp32 checkpoint.accept=bf16": None,
        "scheduler.lr_warmup_init=1e-4": "scheduler.lr_warmup_init=0.0;", "scheduler.lr_wsd_decay_iters=6": None,
    }  # fmt: skip
    for settings, needs in cases.items():
        printed = cli("resume-check", folder, *settings.split(), "--json", code=0 if needs is None else 1)
        found = json.loads(printed)["needs"]
        assert [needs in text for text in found] == ([] if needs is None else [True]), found
    others = {
        "optimizer.adam_beta2": (0.95, 0.5),
        "optimizer.clip_grad": (1.0, 0.5),
        "model.hidden_dropout": (0.0, 0.5),
    }
    for setting, (had, gets) in others.items():
        printed = cli("resume-check", folder, "train.train_iters=14", f"{setting}={gets}")
        assert f"{setting.partition('.')[2]} {had} -> {gets}" in printed
    printed = cli("resume-check", folder, "train.train_iters=14", "train.global_batch_size=2", code=1)
    assert f"global_batch_size {batch} -> 2" in printed
    # another model
    assert "num_layers is 1 in the checkpoint and 4" in cli("resume-check", folder, "--config", "gpt_tiny", code=1)


@pytest.mark.parametrize("odd", [[1], "x", {"scheduler": []}, {"scheduler": {"lr_decay_steps": torch.zeros(2)}}])
def test_a_schedule_that_is_none_is_named(checkpoint, odd, cli):
    from mpbridge.training.checkpoint.format import encoded

    (checkpoint / "state.json").write_text(json.dumps(encoded({"run": odd})))
    files = ("index.json", "state.json", "__0_0.distcp", FILE)
    sums = {name: store._facts(checkpoint / name) for name in files}
    write_whole(checkpoint / store.MANIFEST, json.dumps({"schema": store.SCHEMA, "step": 12, "files": sums}))
    assert "state.json: run.scheduler" in refusal(cli, checkpoint)


def test_what_decides_an_update_is_compared_between_optimizers_with_the_same_states() -> None:
    def of(name: str, clip: float) -> Fingerprint:
        settings = OptimizerFacts(name=name, settings={"clip_grad": clip})
        return made("fp32", dataclasses.replace(FACTS, optimizer=settings))

    adam, others = of("adam", 1.0), {name: of(name, 0.5) for name in ("torch_adamw", "sgd")}
    notes = {name: [note for note in verdict(adam, other).notes if "updates" in note] for name, other in others.items()}
    assert notes == {"torch_adamw": ["other updates: clip_grad 1.0 -> 0.5"], "sgd": []}


def test_states_of_other_parameters_are_not_taken_up() -> None:
    plain, frozen = (
        fingerprint("bf16_mixed", resolve(get_mixed_precision_config("bf16_mixed").derive(frozen=globs)), FACTS, {})
        for globs in (None, ["decoder.layers.0.*"])
    )
    answers = verdict(plain, frozen), verdict(frozen, plain), verdict(frozen, frozen)
    assert [answer.kind for answer in answers] == ["weights only", "weights only", "same"]
    assert "decoder.layers.0.* in the run" in answers[0].why[0]


if __name__ == "__main__":
    GOLDEN.write_text(table())
    print(table())
