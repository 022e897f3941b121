"""Checkpoints between the two realizations: an emulated run's goes on over Transformer Engine's modules, and theirs goes on emulated."""

import json
import shutil

import pytest

from mpbridge import ConfigContainer, pretrain
from mpbridge.common.report.metrics import read
from mpbridge.training.checkpoint import store
from mpbridge.training.checkpoint.verdict import read_fingerprint, verdict
from tests.te_cpu.wheels import OLDEST, ROOT, ran, release_or_skip

RECIPE = "bf16_with_fp8_current_scaling_mixed"
SHAPE = (
    "model.num_layers=2", "model.hidden_size=128", "model.ffn_hidden_size=256", "model.max_sequence_length=64", "data.seq_length=64", "train.train_iters=6",
    "train.global_batch_size=2", "train.micro_batch_size=2", "train.eval_interval=null", "train.exit_interval=2", "ddp.use_distributed_optimizer=true",
    "scheduler.lr_warmup_iters=0", "mixed_precision.first_last_layers_bf16=false", "logger.progress=false",
)  # fmt: skip
STORED = {
    "embedding.word_embeddings.weight": ([320, 128], "bfloat16"),
    "decoder.final_layernorm.weight": ([128], "bfloat16"),
    "decoder.layers.self_attention.linear_qkv.weight": ([2, 384, 128], "bfloat16"),
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": ([2, 128], "bfloat16"),
    "decoder.layers.self_attention.linear_proj.weight": ([2, 128, 128], "bfloat16"),
    "decoder.layers.mlp.linear_fc2.weight": ([2, 128, 256], "bfloat16"),
}
"""What megatron-core names these on a GPU, layers stacked; weights at rest in FP8 are stored as values of the parameters' dtype."""


def emulated(folder) -> list[float]:
    """Losses of an emulated run in this process, which has no Transformer Engine."""
    log = folder.parent / f"log{len(list(folder.parent.iterdir()))}"
    settings = [f"mixed_precision.recipe={RECIPE}", "emulate=true", *places(folder, log)]
    pretrain(ConfigContainer.load(ROOT / "configs/gpt_tiny.yaml", settings).resolved(), quiet=True)
    return [row["loss"] for row in read(log / "metrics.jsonl") if "loss" in row]


def places(folder, log) -> list[str]:
    return [*SHAPE, f"checkpoint.save={folder}", f"checkpoint.load={folder}", f"logger.log_dir={log}"]


def over_transformer_engine(folder, te: str) -> list[float]:
    log = folder.parent / "te"
    played = ("--emulate", "te", "--target", "h100", "--te", te)
    done = ran("-m", "mpbridge", "train", "--config", "gpt_tiny", "--recipe", RECIPE, *played, *places(folder, log))
    assert done.returncode == 3, done.stdout[-3000:] + done.stderr[-3000:]  # it stopped before its end
    return [row["loss"] for row in read(log / "metrics.jsonl") if "loss" in row]


def tensors(place) -> dict[str, tuple[list[int], str]]:
    """Key -> (shape, dtype) of a checkpoint's tensors; the emulation's step counter is its own."""
    rows = json.loads((place / "index.json").read_text())["tensors"].items()
    return {key: (list(row["shape"]), row["dtype"]) for key, row in rows if not key.startswith("emulation.")}


@pytest.mark.timeout(1200)
def test_a_run_goes_on_in_the_other_realization_and_back(tmp_path) -> None:
    te = release_or_skip(OLDEST)
    here, alone = tmp_path / "both", tmp_path / "alone"
    begun = emulated(alone)
    shutil.copytree(alone, here)
    reference = [*begun, *emulated(alone), *emulated(alone)]
    found = [*begun, *over_transformer_engine(here, te), *emulated(here)]
    assert len(reference) == len(found) == 6
    # weights at rest in FP8 are rounded from the main weights, emulated ones from BF16 weights: a code apart here and there
    assert found == pytest.approx(reference, rel=2e-3)
    assert found[2:] != reference[2:]
    first, second, third = (one.path for one in store.saved(here))
    assert tensors(second) == tensors(first) == tensors(third)
    assert STORED.items() <= tensors(second).items()
    prints = [read_fingerprint(one) for one in (first, second)]
    assert [one.realization for one in prints] == ["emulated", "native"]
    for saved, wanted in (prints, prints[::-1]):
        said = verdict(saved, wanted)
        assert said.kind in ("same", "safe")
        assert any("realization" in line for line in said.lines())
