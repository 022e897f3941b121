"""Rehearsals end to end: the small GPT through the command line."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from mpbridge.backend.engines.mcore import McoreEngine
from mpbridge.cli.main import main
from mpbridge.common.errors import UnknownName
from mpbridge.settings.container import ConfigContainer
from mpbridge.training.rehearse import rehearsal
from mpbridge.training.rehearse.rehearsal import Listen, rehearse
from tests.forked import ROOT
from tests.worlds import start

CURRENT, MXFP8, DELAYED = (
    "bf16_with_fp8_current_scaling_mixed",
    "bf16_with_mxfp8_mixed",
    "bf16_with_fp8_delayed_scaling_mixed",
)


TINY = [
    "model.num_layers=3", "model.hidden_size=64", "model.ffn_hidden_size=128", "model.max_sequence_length=32",
    "data.seq_length=32", "train.global_batch_size=4", "train.micro_batch_size=2",
]  # fmt: skip


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Line {i}: the quick brown fox jumps over {i} lazy dogs." for i in range(2000)))
    return [f"data.corpus={text}", f"data.cache_dir={tmp_path / 'cache'}", "data.split='98,1,1'"]


def test_the_command_writes_report_and_page(tmp_path: Path, corpus: list[str], cli) -> None:
    out = tmp_path / "out"
    recipes = f"bf16_mixed,{CURRENT},{DELAYED}"
    command = ["rehearse", *f"--suggest --recipes {recipes} --steps 2 --every 1".split(), "--out", str(out)]
    printed = cli(*command, *TINY, *corpus)
    assert "do not rank recipes" in printed
    assert printed.count("accumulation order") == 1
    # delayed scaling, the last recipe, cannot be tuned: the one before it is
    assert f"suggestion for {CURRENT}: {out / 'tuned.yaml'}" in printed
    assert "verdict:" in printed
    assert f"extends: {CURRENT}" in (out / "tuned.yaml").read_text()
    assert "What tuning suggests" in (out / "index.html").read_text()
    report = json.loads((out / "report.json").read_text())
    by_name = {recipe["recipe"]: recipe for recipe in report["recipes"]}
    assert list(by_name) == recipes.split(",")
    assert all(len(recipe["losses"]) == 2 for recipe in by_name.values())
    # same seed, data and initialisation: the first loss differs by rounding alone
    first = [recipe["losses"][0] for recipe in by_name.values()]
    assert max(first) - min(first) < 0.02
    assert by_name["bf16_mixed"]["verdict"]["word"] == "high precision"
    assert by_name["bf16_mixed"]["measured"] is None
    # eight bits: the gradient is off by a few percent, and no product by more than its operands' formats explain
    for name in (CURRENT, DELAYED):
        assert 0.001 < by_name[name]["measured"]["gradient"]["error"] < 0.3
    assert {row["linear"] for row in by_name[CURRENT]["measured"]["products"]} == {
        f"decoder.layers.1.{name}"
        for name in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    }
    assert all(0.005 < row["fprop"] < 0.1 for row in by_name[CURRENT]["measured"]["products"])
    assert by_name[CURRENT]["quantized"] == 4
    assert by_name[DELAYED]["quantized"] == 12
    assert any(row["staleness"] is not None for row in by_name[DELAYED]["tensors"])
    assert len(by_name[DELAYED]["worst"]) == 10
    assert any("accumulation order" in note for note in by_name[CURRENT]["notes"])
    page = (out / "index.html").read_text()
    assert not re.search(r"""(src|href)=["']?[a-z]+:|url\(|@import|fetch\(|XMLHttpRequest|import\(""", page), (
        "it loads nothing"
    )
    assert '"command"' not in page, "pytest's __main__.py is no mpbridge"
    assert "3 layers, hidden 64" in page
    for name in by_name:
        assert name in page


def test_a_rehearsal_begins_from_a_checkpoints_weights(tmp_path: Path, corpus: list[str], cli) -> None:
    settings, kept = [*TINY, *corpus], str(tmp_path / "kept")
    trained = [
        "train.train_iters=8",
        "scheduler.lr_warmup_iters=1",
        f"logger.log_dir={tmp_path / 'run'}",
        f"checkpoint.save={kept}",
    ]
    cli("train --recipe bf16_mixed", *settings, *trained)
    out = tmp_path / "out"
    command = ["rehearse", "--recipes", f"bf16_mixed,{MXFP8}", "--steps", "1", "--out", str(out), *settings]
    cli(*command, f"checkpoint.load={kept}")
    report = json.loads((out / "report.json").read_text())
    assert report["made"]["weights"].startswith(kept)
    assert [recipe["failure"] for recipe in report["recipes"]] == [None, None]
    assert all(recipe["losses"][0] < 5.0 for recipe in report["recipes"])  # 5.8 from scratch
    assert "no such folder" in cli(*command, f"checkpoint.load={tmp_path / 'nowhere'}", code=2)
    first = tmp_path / "first"  # as in a folder of `mpbridge init`: nothing has been saved yet
    cli(*command, "--recipes", "fp32", f"checkpoint.load={first}", f"checkpoint.save={first}")


def test_overflows_by_which_a_loss_scale_finds_its_value_are_no_damage(tmp_path: Path, corpus: list[str]) -> None:
    recipe, out = tmp_path / "near.yaml", tmp_path / "out"
    recipe.write_text("extends: fp16_with_mxfp8_mixed\ninitial_loss_scale: 4194304\nhysteresis: 1\n")
    fixed = tmp_path / "fixed.yaml"
    fixed.write_text("extends: fp16_mixed\nloss_scale: 4294967296\n")
    command = ["rehearse", "--recipes", f"{recipe},fp16_with_mxfp8_mixed,{fixed}", "--steps", "12", "--every", "1"]
    assert main([*command, "--out", str(out), *TINY, *corpus, "model.num_layers=1"]) == 0
    near, far, always = json.loads((out / "report.json").read_text())["recipes"]
    assert near["verdict"]["word"] == "sound"
    sampled = [step for step, _ in near["tensors"][0]["amax"]]
    assert 1 not in sampled  # overflowed, and was skipped
    assert sampled
    assert sampled[-1] == 12
    # 2**32 takes more steps than these, so nothing was trained
    assert (far["verdict"]["word"], len(far["losses"]), far["tensors"]) == ("failed", 12, [])
    assert "0 of 12 steps were applied" in far["failure"]
    assert "more steps, or a recipe file with a lower initial_loss_scale" in far["failure"]
    assert always["failure"].endswith("(cure: a recipe file with a lower loss_scale)")


def test_a_loss_that_is_not_finite_is_no_overflow_of_the_loss_scale(tmp_path: Path, corpus: list[str], cli) -> None:
    out = tmp_path / "out"
    command = ["rehearse", "--recipes", "fp16_mixed", "--steps", "2", "--out", str(out), *TINY, *corpus]
    cli(*command, "model.init_method_std=1e6", code=1)
    assert json.loads((out / "report.json").read_text())["recipes"][0]["verdict"] == {
        "word": "failed",
        "reasons": ["the loss of step 1 is not finite"],
    }


def test_a_rehearsal_that_a_signal_ends_is_interrupted_and_judges_no_part(
    tmp_path: Path, corpus: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped = Listen.stepped

    def told(self: Listen, training: Any, result: Any) -> None:
        stepped(self, training, result)
        if training.counters.iteration == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Listen, "stepped", told)
    out = tmp_path / "out"
    words = ["rehearse", "--recipes", f"{MXFP8},bf16_mixed", "--steps", "6", "--out", str(out), *TINY, *corpus]
    assert main(words) == 130
    said = capsys.readouterr()
    assert "interrupted" in said.err
    (only,) = json.loads((out / "report.json").read_text())["recipes"]  # the second one did not begin
    assert only["verdict"]["word"] == "interrupted"
    assert re.fullmatch(r"SIGINT after [23] of 6 steps", only["interrupted"])
    assert "sound" not in said.out


@pytest.mark.parametrize("engine", ["fsdp2", "megatron_fsdp"])
def test_gradients_decide_on_every_engine(
    engine: str, tmp_path: Path, corpus: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"extends: {CURRENT}\nfp8_param_gather: false\n")
    rest = ["--steps", "1", "--out", str(tmp_path / "out"), *TINY, *corpus, f"engine={engine}"]
    assert main(["rehearse", "--recipes", str(recipe), *rest]) == 0, capsys.readouterr().out
    (found,) = json.loads((tmp_path / "out" / "report.json").read_text())["recipes"]
    assert 0.001 < found["measured"]["gradient"]["error"] < 0.3
    assert len(found["measured"]["products"]) == found["quantized"] == 4


def test_an_engine_that_lacks_what_gradients_are_compared_with_trains_and_is_refused_before_the_first_step(
    tmp_path: Path, corpus: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one of another package that was written for an earlier interface."""
    monkeypatch.delattr(McoreEngine, "counted_gradients")
    rest = ["--steps", "1", "--out", str(tmp_path / "out"), *TINY, *corpus]
    assert main(["rehearse", "--recipes", f"{CURRENT},bf16_mixed", *rest]) == 0
    refused, plain = json.loads((tmp_path / "out" / "report.json").read_text())["recipes"]
    assert refused["verdict"]["word"] == "failed"
    assert "engine=mcore has no counted_gradients, expected both methods of" in refused["failure"]
    assert (refused["losses"], len(plain["losses"])) == ([], 1)
    assert main(["tune", "--recipe", CURRENT, "--out", str(tmp_path / "tuned.yaml"), *TINY, *corpus]) == 1
    assert "engine=mcore has no counted_gradients" in capsys.readouterr().err


def test_torchaos_linears_are_judged_by_the_gradient(
    tmp_path: Path, corpus: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchao")
    rest = ["--steps", "1", "--out", str(tmp_path / "out"), *TINY, *corpus, "engine=fsdp2"]
    assert main(["rehearse", "--recipes", "bf16_with_fp8_rowwise", *rest]) == 0, capsys.readouterr().out
    (found,) = json.loads((tmp_path / "out" / "report.json").read_text())["recipes"]
    assert found["verdict"]["word"] == "sound"
    assert 0.001 < found["measured"]["gradient"]["error"] < 0.3
    assert (found["quantized"], found["tensors"]) == (12, [])
    page = (tmp_path / "out" / "index.html").read_text()
    assert "12 linears quantized, 0 kept in high precision" in page
    assert found["notes"][0] in page


@pytest.mark.slow
def test_two_pipeline_stages_are_one_report(tmp_path: Path, corpus: list[str]) -> None:
    split = ["model.num_layers=2", "parallel.pipeline_model_parallel_size=2"]
    settings = [one for one in [*TINY, *corpus] if not one.startswith("model.num_layers")]
    out = tmp_path / "out"
    command = ["rehearse", *f"--recipes {MXFP8} --steps 1".split(), "--out", str(out)]
    said = start(2, str(ROOT / "mpbridge" / "__main__.py"), *command, *settings, *split)
    assert said.count(f"{MXFP8}: sound (") == 1
    (recipe,) = json.loads((out / "report.json").read_text())["recipes"]
    assert sorted(recipe["layers"]) == ["0", "1"]
    assert recipe["quantized"] == 8


def test_a_recipe_that_cannot_run_is_reported_beside_the_others(
    tmp_path: Path, corpus: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    odd = [*TINY, *corpus, "model.ffn_hidden_size=80"]
    rest = ["--steps", "1", "--out", str(tmp_path / "out"), *odd]
    assert main(["rehearse", "--recipes", f"bf16_mixed,{MXFP8}", *rest]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["recipes"][1]["verdict"]["word"] == "failed"
    assert "80" in report["recipes"][1]["failure"]
    assert main(["rehearse", "--recipes", MXFP8, *rest]) == 1
    capsys.readouterr()


def test_a_rehearsal_trains_what_the_run_trains() -> None:
    policy = rehearsal._run(ConfigContainer.load("lora_tiny"), CURRENT, 2).policy
    assert (policy.frozen, policy.quantized) == (("*",), True)


def test_misuse_is_said_before_anything_runs(cli) -> None:
    assert "bf16_with_mxfp8_mixed" in cli("rehearse --recipes bf16_mxfp9", code=2)
    cli("rehearse --steps 0", code=2)
    with pytest.raises(UnknownName):
        rehearse(None, ["nope"])  # type: ignore[arg-type]
