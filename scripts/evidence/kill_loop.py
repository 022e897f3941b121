"""Kills a run with SIGKILL repeatedly, mostly during its saves, and checks that nothing was lost.

    python scripts/evidence/kill_loop.py --kills 50

Each time, the newest checkpoint must be complete and the run must continue from it; each run that reaches its end must end with the weights,
to the bit, of an uninterrupted one. A process is forked for each attempt, so that megatron-core is imported once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from mpbridge.planning.rules.table import rules
from mpbridge.settings.container import ConfigContainer
from mpbridge.training.base import Hook
from mpbridge.training.checkpoint import io as checkpoint
from mpbridge.training.checkpoint import store
from mpbridge.training.loop import pretrain
from scripts.evidence.soak import MODEL, Text, digest


class Told(Hook):
    """Writes a line into a pipe for every step, and the final loss and a digest of the weights."""

    def __init__(self, pipe: int) -> None:
        self.pipe, self.loss = pipe, 0.0

    def say(self, text: str) -> None:
        os.write(self.pipe, f"{text}\n".encode())

    def stepped(self, training: Any, result: Any) -> None:
        self.loss = result.loss
        self.say(f"step {training.counters.iteration}")

    def finished(self, training: Any) -> None:
        self.say(f"end {self.loss.hex()} {digest(training)}")


def made(folder: Path | None, steps: int, background: bool) -> Any:
    """The run: every step is saved."""
    kept = (
        {"save": str(folder), "load": str(folder), "save_interval": 1, "keep_last": 3, "async_save": background}
        if folder
        else {}
    )
    return ConfigContainer(
        mixed_precision="bf16_mixed",
        model=MODEL,
        optimizer={"lr": 1e-3},
        train={"micro_batch_size": 2, "global_batch_size": 4, "train_iters": steps, "eval_interval": None, "threads": 1},
        checkpoint=kept,
    ).resolved()  # fmt: skip


def fork(folder: Path | None, steps: int, background: bool) -> tuple[int, int]:
    """(process id, pipe to read from) of a child that trains."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    code = 1
    try:
        os.close(read)
        told = Told(write)
        # the kills target these moments
        for owner, name in ((store, "begin"), (store, "seal"), (checkpoint, "gather")):
            setattr(owner, name, _announced(getattr(owner, name), name, told))
        pretrain(made(folder, steps, background), dataset=Text(), hooks=[told], quiet=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _announced(function: Any, name: str, told: Told) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        told.say(f"save {name}")
        return function(*args, **kwargs)

    return call


def lines(pipe: int, seconds: float) -> list[str]:
    """The child's output within that time, empty if there is none; [''] at its end."""
    ready, _, _ = select.select([pipe], [], [], seconds)
    return os.read(pipe, 65536).decode().split("\n")[:-1] or [""] if ready else []


def to_the_end(pid: int, pipe: int, limit: float) -> str:
    """The child's 'end' line; raises RuntimeError if there is none."""
    end, stop = "", time.monotonic() + limit
    while time.monotonic() < stop:
        heard = lines(pipe, 1.0)
        end = next((line for line in heard if line.startswith("end ")), end)
        if heard == [""]:
            break
    os.close(pipe)
    _, status = os.waitpid(pid, 0)
    if status or not end:
        raise RuntimeError(f"a run that was not killed ended with status {status} and printed {end!r}")
    return end


def attempt(pid: int, pipe: int, dice: random.Random) -> tuple[bool, str, bool]:
    """Kills the child at a random moment: (whether it was killed, its 'end' line if it was faster, whether a save was in progress)."""
    mark, count = dice.choice(["save begin", "save gather", "save seal"] * 2 + ["step "]), dice.randint(1, 6)
    delay = dice.uniform(0.0, 0.02)
    end, saving, stop = "", False, time.monotonic() + 120
    while time.monotonic() < stop:
        heard = lines(pipe, 1.0)
        if heard == [""]:
            break
        for line in heard:
            saving = line.startswith("save") if line else saving
            end = line if line.startswith("end ") else end
            count -= line.startswith(mark)
        if count <= 0:
            time.sleep(delay)
            break
    writers = children_of(pid)
    os.kill(pid, signal.SIGKILL)
    os.close(pipe)
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if not killed and status:
        raise RuntimeError(f"a run ended on its own with status {status}")
    stop = time.monotonic() + 5
    while any(Path(f"/proc/{writer}").exists() for writer in writers):
        if time.monotonic() > stop:
            raise RuntimeError(f"writers {writers} outlived the run that they belonged to")
        time.sleep(0.01)
    return killed, end, saving


def children_of(pid: int) -> list[int]:
    """Children of a process, from /proc; empty elsewhere."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def survive(
    kills: int, *, steps: int = 40, seed: int = 0, room: Path | None = None, say: Any = print
) -> dict[str, Any]:
    """The figures of `kills` kills; raises RuntimeError at the first loss of data."""
    torch.set_num_threads(1)
    rules()  # imported here, once: otherwise each child would load it again
    dice, began = random.Random(seed), time.monotonic()
    expected = to_the_end(*fork(None, steps, False), limit=600)
    say(f"uninterrupted: {expected}")
    figures = {"kills": 0, "during_saves": 0, "runs_completed": 0, "resumes": 0, "lost": 0}
    base = Path(tempfile.mkdtemp(prefix="mpbridge-kill-", dir=room))
    try:
        folder, background = base / "0", False
        while figures["kills"] < kills:
            pid, pipe = fork(folder, steps, background)
            killed, end, saving = attempt(pid, pipe, dice)
            figures["kills"] += killed
            figures["during_saves"] += killed and saving
            newest = store.saved(folder)
            for entry in newest[:1]:
                store.check(entry.path)
            say(
                f"kill {figures['kills']}: {'during a save' if saving else 'between'}, newest complete: {newest[0].path.name if newest else 'none yet'}"
            )
            # reaching the end between kills alone would take too long in later rounds, so sometimes the run is not killed
            if newest and (newest[0].step >= steps - 3 or dice.random() < 0.15 or figures["kills"] == kills):
                end = end or to_the_end(*fork(folder, steps, background), limit=600)
                figures["resumes"] += 1
                figures["runs_completed"] += 1
                if end != expected:
                    raise RuntimeError(
                        f"after {figures['kills']} kills the run ended with {end!r}, expected {expected!r}"
                    )
                folder, background = base / str(figures["runs_completed"]), not background
            figures["resumes"] += bool(newest)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return figures | {"seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(json.dumps(survive(args.kills, steps=args.steps, seed=args.seed)))


if __name__ == "__main__":
    sys.exit(main())
