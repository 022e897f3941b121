"""scripts/pretrain.py as users start it: exit codes, two processes, one voice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpbridge.common.report.metrics import read
from mpbridge.training.loop import pretrain
from tests.forked import python
from tests.training.tiny import tiny

ROOT = Path(__file__).resolve().parents[2]


def _start(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    config = folder / "tiny.yaml"
    # dump() writes what a file can hold, which is all of this container
    tiny(folder).dump(config)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-W", "ignore", *torchrun, "scripts/pretrain.py", "--config", str(config), *options]
    where = {"cwd": ROOT, "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "stdin": subprocess.DEVNULL}
    return subprocess.run(command, capture_output=True, text=True, timeout=840, check=False, **where)


def _losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read(folder / "metrics.jsonl") if "loss" in row]


def test_two_processes_train_what_one_does_and_rank_0_speaks(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    pretrain(tiny(tmp_path, "fp32", logger={"log_dir": str(one)}).resolved(), quiet=True)
    options = (f"logger.log_dir={two}", "ddp.use_distributed_optimizer=true", "train.micro_batch_size=2")
    both = _start(tmp_path, "--recipe", "fp32", *options)
    assert both.returncode == 0, both.stdout[-2000:] + both.stderr[-3000:]
    assert len(_losses(one)) == 6
    assert _losses(two) == pytest.approx(_losses(one), abs=1e-6)
    assert both.stdout.count("step 6/6") == 1
    assert both.stdout.count("what the recipe decides") == 1


def test_a_recipe_that_cannot_run_here_ends_with_1_and_one_paragraph(tmp_path: Path) -> None:
    tiny(tmp_path).dump(tmp_path / "tiny.yaml")
    script = ["scripts/pretrain.py", "--config", str(tmp_path / "tiny.yaml"), "--recipe", "bf16_with_mxfp8_mixed"]
    done = python(script)
    assert done.returncode == 1
    assert "What works:" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "run").exists()
