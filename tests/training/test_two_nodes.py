"""Two nodes on one machine: a torchrun agent for each, meeting over loopback. One is lost with its ranks; the same commands go on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpbridge.common.probe import free_port

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--config", "gpt_tiny", "model.num_layers=1", "model.hidden_size=64", "model.ffn_hidden_size=128", "model.num_attention_heads=2", "data.seq_length=32", "train.eval_interval=null", "train.log_interval=1", "scheduler.lr_decay_iters=1000", "ddp.use_distributed_optimizer=true"]  # fmt: skip


def agents(folder: Path, *settings: str) -> list[subprocess.Popen[bytes]]:
    """One agent a node, as `torchrun --nnodes 2` is started on each; node 0 is the meeting place."""
    meet = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{free_port()} --rdzv-id=test --local-addr=127.0.0.1".split()
    keep = [f"checkpoint.save={folder}/kept", f"checkpoint.load={folder}/kept", f"logger.log_dir={folder}/run"]
    known = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    made = []
    for node in range(2):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *meet, f"--rdzv-conf=is_host={1 - node}"]  # fmt: skip
        out = (folder / f"node{node}.txt").open("ab")
        made.append(subprocess.Popen([*command, "-m", "mpbridge", "train", *TINY, *keep, *settings], env=known, stdout=out, stderr=out))  # fmt: skip
        out.close()
    return made


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def steps(folder: Path) -> list[int]:
    file = folder / "run" / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line)["iteration"] for line in text.splitlines() if line.endswith("}")]


def said(folder: Path) -> str:
    return "".join((folder / f"node{node}.txt").read_text()[-20000:] for node in range(2))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds a node's ranks in Linux's /proc")
@pytest.mark.timeout(900)
def test_a_run_that_lost_a_node_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    running = agents(tmp_path, "train.train_iters=100000", "checkpoint.save_interval=5")
    try:
        deadline = time.monotonic() + 300
        while len(steps(tmp_path)) < 12 and time.monotonic() < deadline:
            assert all(agent.poll() is None for agent in running), said(tmp_path)
            time.sleep(0.1)
        assert len(steps(tmp_path)) >= 12, f"{len(steps(tmp_path))} steps in 300 s\n{said(tmp_path)}"
        ranks = children(running[1].pid)
        assert len(ranks) == 1
        for pid in (*ranks, running[1].pid):  # the node is gone: no notice, no clean end
            os.kill(pid, signal.SIGKILL)
        assert running[0].wait(timeout=840) == 1, said(tmp_path)
    finally:
        for agent in running:
            agent.kill()
            agent.wait()
    assert "another rank of the job died" in said(tmp_path)
    newest = max(int(path.name.removeprefix("step_")) for path in (tmp_path / "kept").glob("step_*"))
    assert newest >= 5

    again = agents(tmp_path, f"train.train_iters={newest + 3}")
    assert [agent.wait(timeout=840) for agent in again] == [0, 0], said(tmp_path)
    resumed = re.search(r"resumed from \S*step_(\d+)", said(tmp_path))
    assert resumed is not None
    assert int(resumed[1]) == newest
    assert steps(tmp_path)[-3:] == [newest + 1, newest + 2, newest + 3]
