"""The scripts that a GPU's hour is spent on work: run here on a shape for a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_benchmark_and_report_run_from_end_to_end(tmp_path):
    command = [
        "scripts/evidence/bench_gpu.py",
        "--shapes",
        "smoke",
        "--recipes",
        "bf16_mixed",
        "--rounds",
        "1",
        "--steps",
        "2",
        "--profile",
    ]
    command += ["--set", "optimizer.clip_grad=0.5", "--out", str(tmp_path / "bench.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    table = json.loads((tmp_path / "bench.json").read_text())["shapes"]["smoke"]
    ours, bare = table["bf16_mixed"], table["bare megatron-core, bf16_mixed"]
    # the same configs, weights and batches; only the bare loop steps a schedule of the learning rate
    assert ours["loss"] == pytest.approx(bare["loss"], rel=1e-4)
    assert ours["tokens_per_s"] > 0
    assert ours["kinds"]["GEMM"] > 0
    (tmp_path / "tests.log").write_text("==== 3 passed, 1 skipped in 2s ====\nSKIPPED [1] somewhere: no reason\n")
    report = subprocess.run(
        [sys.executable, "scripts/evidence/gpu_report.py", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert "3 passed, 1 skipped" in report
    assert "| bf16_mixed |" in report
    assert "| 1.000 |" in report
    assert "by kind of kernel" in report


def test_without_a_device_it_says_so_and_fails(tmp_path):
    environment = os.environ | {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    if any((Path(folder) / "nvidia-smi").exists() for folder in ("/usr/bin", "/bin")):
        environment["PATH"] = str(tmp_path)
    done = subprocess.run(
        ["/bin/bash", "scripts/gpu_check.sh", "--out", str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, "no CUDA device here" in done.stderr) == (1, True)
