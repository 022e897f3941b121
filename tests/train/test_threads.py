"""A run that is over leaves no thread behind: a process may hold many runs, one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpbridge.train.loop import pretrain
from tests.train.tiny import tiny_run

TASKS = Path("/proc/self/task")


def gloo() -> int:
    """Threads of gloo's process groups: a loop and two workers each."""
    return sum("gloo" in (task / "comm").read_text() for task in TASKS.iterdir())


@pytest.mark.skipif(not TASKS.exists(), reason="counts threads in Linux's /proc")
def test_a_run_leaves_no_thread_of_its_process_groups_behind(tmp_path: Path) -> None:
    before = gloo()
    run = tiny_run(tmp_path, model={"position_embedding_type": "rope"}, train={"train_iters": 1, "eval_interval": None})
    pretrain(run, quiet=True)
    assert gloo() == before
