"""The scripts that a GPU's hour is spent on work: run here on a shape for a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def ran(*command: str, timeout: int = 200, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=timeout, check=False
    )


def reported(folder: Path) -> str:
    """What the report says of the files in a folder."""
    done = ran(sys.executable, "scripts/evidence/gpu_report.py", str(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_benchmark_and_report_run_from_end_to_end(tmp_path):
    command = ["scripts/evidence/bench_gpu.py", "--shapes", "smoke", "--recipes", "bf16_mixed", "--rounds", "1"]
    command += ["--steps", "2", "--profile", "--set", "optimizer.clip_grad=0.5", "--out", str(tmp_path / "speed.json")]
    done = ran(sys.executable, *command, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    table = json.loads((tmp_path / "speed.json").read_text())["shapes"]["smoke"]
    ours, bare = table["bf16_mixed"], table["bare megatron-core, bf16_mixed"]
    # the same configs, weights and batches; only the bare loop steps a schedule of the learning rate
    assert ours["loss"] == pytest.approx(bare["loss"], rel=1e-4)
    assert ours["tokens_per_s"] > 0
    assert ours["kinds"]["GEMM"] > 0
    (tmp_path / "steps.tsv").write_text("speed\t1\t31\t180\nspeed\t0\t56\t180\nprofile\t124\t590\t590\n")
    (tmp_path / "tests.log").write_text("==== 3 passed, 1 skipped in 2s ====\nSKIPPED [1] somewhere: no reason\n")
    report = reported(tmp_path)
    assert "3 passed, 1 skipped" in report
    assert "| speed | done | 56 | 180 |" in report
    assert "| profile | stopped at its limit | 590 | 590 |" in report
    assert "31" not in report.partition("## Speed and memory")[0], "of a step that was run again, the last"
    assert "| bf16_mixed |" in report
    assert "| 1.000 |" in report
    assert "by kind of kernel" in report


def test_of_tests_that_were_stopped_the_report_says_how_those_before_ended(tmp_path):
    (tmp_path / "tests.log").write_text(
        "tests/gpu/test_a.py::test_b[MXFP8 of 4 x 8] PASSED [  1%]\ntests/gpu/test_a.py::test_c FAILED [  2%]\ntests/gpu/test_a.py::test_d "
    )
    assert "stopped; by then 1 passed, 1 failed\n\n- FAILED tests/gpu/test_a.py::test_c" in reported(tmp_path)


def test_without_a_device_it_says_so_and_fails(tmp_path):
    there = any((Path(folder) / "nvidia-smi").exists() for folder in ("/usr/bin", "/bin"))
    path = str(tmp_path) if there else "/usr/bin:/bin"
    done = ran("/bin/bash", "scripts/gpu_check.sh", "--out", str(tmp_path), PATH=path, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, "no CUDA device here" in done.stderr) == (1, True)


@pytest.mark.slow
def test_a_dry_run_plays_the_gpu_and_a_failing_step_does_not_end_the_rest(tmp_path):
    """The kernels' bytes agree with themselves; without room for its file the benchmark fails, and the report says both."""
    (tmp_path / "speed.json").mkdir()
    command = ["scripts/gpu_check.sh", "--dry-run", "--out", str(tmp_path), "--only", "speed", "kernels"]
    done = ran("/bin/bash", *command, timeout=900)
    ended = dict(line.split("\t")[:2] for line in (tmp_path / "steps.tsv").read_text().splitlines())
    assert (done.returncode, ended["kernels"], ended["speed"] != "0") == (1, "0", True), done.stdout[-3000:]
    assert "operand tensorwise e4m3: 1048592 of 1048592 bytes equal" in (tmp_path / "report.md").read_text()
