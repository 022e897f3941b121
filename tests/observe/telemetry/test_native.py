"""Measuring Transformer Engine's own quantized tensors, on a played machine: megatron-core decides at import, so each run is a process. What is measured: tests/te_cpu/inside/measured.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpbridge.common.report import metrics
from tests.forked import ROOT
from tests.te_cpu.wheels import OLDEST, environment, release_or_skip

SMALL = [
    "model.num_layers=2", "model.hidden_size=128", "model.ffn_hidden_size=256", "model.max_sequence_length=64", "data.seq_length=64",
    "train.global_batch_size=2", "train.train_iters=4", "train.eval_interval=null", "scheduler.lr_warmup_iters=1",
]  # fmt: skip
SCALINGS = {
    "delayed": ("bf16_with_fp8_delayed_scaling_mixed", "h100", ["mixed_precision.fp8_param_gather=false"]),
    "mxfp8": ("bf16_with_mxfp8_mixed", "b200", ["mixed_precision.fp8_param_gather=false", "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag=false"]),
}  # fmt: skip


def trained(folder: Path, recipe: str, machine: str, every: int, settings: list[str]) -> Path:
    release_or_skip(OLDEST)
    text = folder / "text.txt"
    text.write_text("".join(f"line {n} says {n * n}\n" for n in range(4000)))
    out = folder / f"run-{every}"
    data = [f"data.corpus={text}", f"data.cache_dir={folder / 'cache'}", "data.split='90,10'"]
    command = [sys.executable, "-W", "ignore", "-m", "mpbridge", "train", "--config", "gpt_tiny", "--recipe", recipe, "--emulate=te", "--target", machine, "--te", OLDEST]  # fmt: skip
    command += [f"logger.log_dir={out}", f"logger.precision_every={every}", *SMALL, *data, *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALINGS)
def test_measuring_changes_no_bit_of_native_training(tmp_path: Path, scaling: str) -> None:
    recipe, machine, settings = SCALINGS[scaling]
    plain, watched = (trained(tmp_path, recipe, machine, every, settings) for every in (0, 1))
    losses = [
        [(row["loss"], row["grad_norm"]) for row in metrics.read(folder / "metrics.jsonl")]
        for folder in (plain, watched)
    ]
    assert losses[0] == losses[1]
