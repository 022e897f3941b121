"""The command on a small GPT: its table, its recipe file, what trains with it, and two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from megatron.core.distributed import DistributedDataParallelConfig

from mpbridge.cli.main import main
from mpbridge.settings.container import ConfigContainer
from mpbridge.training.process import bare
from mpbridge.training.tune.proof import _norm2
from tests.worlds import start

NVFP4 = "bf16_with_nvfp4_mixed"
TINY = [
    "model.num_layers=3", "model.hidden_size=64", "model.ffn_hidden_size=128", "model.max_sequence_length=32",
    "data.seq_length=32", "train.global_batch_size=2", "train.micro_batch_size=1",
]  # fmt: skip


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Line {i}: the quick brown fox jumps over {i} lazy dogs." for i in range(2000)))
    return [f"data.corpus={text}", f"data.cache_dir={tmp_path / 'cache'}", "data.split='90,10,0'"]


def test_the_recipe_is_written_shown_and_trains(tmp_path: Path, corpus: list[str], cli) -> None:
    out, settings = tmp_path / "tuned.yaml", [*TINY, *corpus]
    command = ["tune", "--recipe", NVFP4, "--batches", "4", "--unseen", "2", "--budget", "time=1.7", "--out", str(out)]
    printed = cli(*command, *settings, code=(0, 1))
    for word in ("last 15 % bf16", "whole kinds", "all mxfp8", "random 3", "verdict:", "Spearman", "yardstick"):
        assert word in printed
    content = yaml.safe_load(out.read_text())
    assert content["extends"] == NVFP4
    proof = content["evidence"]["proof"]
    assert proof["tuned"]["cost"] <= 1.7
    assert proof["tuned"]["error"] < proof["all low"]["error"]
    card = cli("show", out)
    assert "evidence" in card
    assert "randomly initialized weights" in card
    trained = ["train.train_iters=1", "train.eval_interval=null", "scheduler.lr_warmup_iters=0", "train.audit=stop"]
    cli("train --recipe", out, "--emulate", *settings, *trained)


def test_a_config_object_of_the_wrapper_is_left_out_as_a_section_is() -> None:
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=False)
    made = bare(ConfigContainer(mixed_precision=NVFP4, model={"num_layers": 1}, ddp=ddp))
    assert not made.ddp


def test_the_norm_of_fp16_gradients_does_not_overflow() -> None:
    # a loss scale would be lowered until squares fit FP16
    assert _norm2([torch.full((4,), 300.0, dtype=torch.float16)]) == 4 * 300.0**2


def test_a_budget_of_bytes_counts_the_fullest_rank(tmp_path: Path, corpus: list[str], cli) -> None:
    out = tmp_path / "tuned.yaml"
    command = ["tune", "--recipe", NVFP4, "--batches", "4", "--unseen", "2", "--target", "gb200", "--out", str(out)]
    printed = cli(*command, "--levels", "bf16", "--budget", "memory=1KB", *TINY, *corpus, code=2, error="beside")
    assert "nothing meets it" in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--budget", "speed=3"], "expected time=1.1"),
        (["--batches", "3"], "fewer than 4"),
        (["--levels", "mxfp9"], "level='mxfp9': expected 'bf16'"),
        (["--stack", "megatron"], "no stack named 'megatron'"),
        (["--levels", "delayed"], "cannot be chosen per module"),
        (["--target", "h100"], "does not run on H100"),
        (["--out", "nowhere/tuned.yaml"], "in an existing folder"),
        (["--checkpoint", "nowhere"], "no such folder"),
    ],
)
def test_bad_arguments_are_a_sentence(arguments: list[str], says: str, cli, corpus: list[str]) -> None:
    assert says in cli("tune --recipe", NVFP4, *arguments, *TINY, *corpus, code=(1, 2), error=True)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, corpus: list[str], cli) -> None:
    kept = tmp_path / "kept"
    settings = [*TINY, *corpus]
    trained = [
        "train.train_iters=1", "scheduler.lr_warmup_iters=0", "train.eval_interval=null", f"checkpoint.save={kept}",
    ]  # fmt: skip
    cli("train --recipe bf16_mixed", *settings, *trained)
    wider = [one for one in settings if not one.startswith("model.ffn")] + ["model.ffn_hidden_size=256"]
    command = ["tune", "--recipe", NVFP4, "--checkpoint", str(kept), "--out", str(tmp_path / "t.yaml")]
    printed = cli(*command, *wider, code=1, error=True)
    assert "another model: ffn_hidden_size is 128 in the checkpoint and 256 in the run" in printed


MOE = [
    "model.num_moe_experts=4", "model.moe_layer_freq=[0,1,1]", "model.moe_ffn_hidden_size=128",
    "model.moe_router_topk=2", "model.moe_token_dispatcher_type=alltoall",
]  # fmt: skip
LAYOUTS = {
    "data": [],
    "tensor": ["parallel.tensor_model_parallel_size=2"],
    "pipeline": ["parallel.pipeline_model_parallel_size=2", "model.num_layers=4"],
    "expert": ["parallel.expert_model_parallel_size=2", *MOE],
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_give_one_processs_answer(layout: str, tmp_path: Path, corpus: list[str]) -> None:
    settings = [*TINY, *corpus, *LAYOUTS[layout]]
    alone = [word for word in settings if not word.startswith("parallel.")]
    if layout == "tensor":  # the vocabulary is padded to a multiple of this and of the ranks
        alone.append("data.vocab_divisible_by=128")
    # weights as drawn depend on the layout
    steps = ["train.train_iters=2", "scheduler.lr_warmup_iters=0", "train.eval_interval=null"]
    assert main(["train", "--recipe", "bf16_mixed", *alone, *steps, f"checkpoint.save={tmp_path / 'kept'}"]) == 0
    asked = ["--recipe", NVFP4, "--batches", "4", "--unseen", "2", "--checkpoint", str(tmp_path / "kept")]
    assert main(["tune", *asked, "--out", str(tmp_path / "1.yaml"), *alone]) in (0, 1)
    start(2, str(Path(__file__).with_name("worker.py")), *asked, "--out", str(tmp_path / "2.yaml"), *settings)
    one, two = (yaml.safe_load((tmp_path / f"{size}.yaml").read_text()) for size in (1, 2))
    assert one["evidence"]["layout"] != two["evidence"]["layout"]
    assert one["modules"]
    # ranks draw other random bits; tensor-parallel ones take their operands' largest elements from their own shards, expert-parallel ones see tokens in
    # another order: other rounding errors of the same size, which turn near ties
    same = layout in ("data", "pipeline")
    found = [{name: said for name, said in each.items() if name != "evidence"} for each in (one, two)]
    if same:
        assert found[0] == found[1]
    # what a rank's experts cost follows from how many it has, and the choice from what things cost
    chosen = () if layout == "expert" else ("tuned",)
    for name in ("all low", "last 15 % bf16", "all mxfp8", *chosen):
        figures = (each["evidence"]["proof"][name]["error"] for each in (one, two))
        assert next(figures) == pytest.approx(next(figures), rel=0.15), (name, found)
    for kind, levels in one["evidence"]["scores"].items():
        for level, layers in levels.items():
            near = pytest.approx(layers, rel=0.5)
            assert two["evidence"]["scores"][kind][level] == near, (kind, level)
