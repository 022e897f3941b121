"""Transformer Engine's own modules, on a CPU: their scales and amax histories are data in a checkpoint, and the run goes on to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mpbridge.common.report.metrics import read
from mpbridge.training.checkpoint import store
from mpbridge.training.checkpoint.json_codec import decoded
from tests.te_cpu.wheels import OLDEST, ROOT, environment, release_or_skip

DELAYED = (
    "--config", "gpt_tiny", "--recipe", "bf16_with_fp8_delayed_scaling_mixed", "--emulate", "te", "--target", "h100", "--te", OLDEST,
    "train.train_iters=4", "train.eval_interval=null", "train.micro_batch_size=2", "train.global_batch_size=2", "model.num_layers=2",
    "model.hidden_size=64", "model.ffn_hidden_size=128", "mixed_precision.fp8_param_gather=false", "mixed_precision.fp8_amax_history_len=4",
)  # fmt: skip


def train(folder, *settings):
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "mpbridge",
        "train",
        *DELAYED,
        f"logger.log_dir={folder}",
        *settings,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment() | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    return done.returncode, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.timeout(900)
def test_delayed_scaling_goes_on_to_the_bit_and_its_histories_are_data(tmp_path):
    release_or_skip(OLDEST)
    kept = (f"checkpoint.save={tmp_path / 'kept'}", f"checkpoint.load={tmp_path / 'kept'}")
    for code, folder, settings in (
        (0, "whole", ()),
        (3, "parts", (*kept, "train.exit_interval=2")),
        (0, "parts", kept),
    ):
        found, said = train(tmp_path / folder, *settings)
        assert found == code, said
    whole, parts = (
        [row["loss"] for row in read(tmp_path / name / "metrics.jsonl") if "loss" in row] for name in ("whole", "parts")
    )
    assert len(whole) == 4
    assert whole == parts
    place = store.saved(tmp_path / "kept")[-1].path
    index = json.loads((place / "index.json").read_text())
    states = []
    for key, (number, at, size) in index["objects"].items():
        if "_extra_state" in key:
            raw = (place / index["files"][number]).read_bytes()[at : at + size]
            states.append(decoded(json.loads(raw)))
    quantized = [state for state in states if state is not None]
    assert len(quantized) >= 8  # four linears in each of two layers
    assert all(
        state["recipe"] == {"class": "DelayedScaling", "fields": {"margin": 0, "amax_history_len": 4}}
        for state in quantized
    )
    assert any(state["amax_history_fwd"].any() for state in quantized)
