"""Each recipe of the optimizer-state family trains through the real loop, and its audit is part of the run's output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked import ROOT, python

RECIPES = (
    "bf16_params_fp32_states", "fp32_params_bf16_compute", "full_bf16", "bf16_mixed_bf16_moments", "bf16_megatron_fsdp",
)  # fmt: skip
SMALL = [
    "model.num_layers=2", "model.hidden_size=64", "model.ffn_hidden_size=128", "model.max_sequence_length=64", "data.seq_length=64", "train.train_iters=4",
    "train.eval_interval=null", "scheduler.lr_warmup_iters=2", "train.global_batch_size=4", "logger.progress=false",
]  # fmt: skip
QUICK = ("bf16_params_fp32_states", "bf16_megatron_fsdp")
"""One of each engine; the others' states are audited beside megatron-core's engine (test_audit.py)."""


@pytest.mark.parametrize(
    ("recipe", "processes"),
    [pytest.param(recipe, processes, marks=[] if recipe in QUICK and processes == 1 else pytest.mark.slow) for recipe in RECIPES for processes in (1, 2)],
)  # fmt: skip
def test_it_trains_with_the_audit_printed_and_kept(recipe: str, processes: int, tmp_path: Path) -> None:
    command = [f"{ROOT}/scripts/pretrain.py", "--recipe", recipe, "--config", f"{ROOT}/configs/gpt_tiny.yaml"]
    size = processes if processes > 1 else 0
    done = python([*command, *SMALL, f"logger.log_dir={tmp_path}"], size=size, timeout=200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    assert all(words in done.stdout for words in ("static audit", "live audit", "weights moved"))
    audit = json.loads((tmp_path / "precision.json").read_text())["audit"]
    assert audit["static"]["ok"]
    assert (audit["live"]["ok"], audit["live"]["world_size"]) == (True, processes)
