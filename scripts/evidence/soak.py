"""Two processes train, save in the foreground or the background, are audited, and suffer random faults of every kind; nothing may be lost.

    python scripts/evidence/soak.py --steps 2000 --faults 40

First runs without faults: memory, descriptors and threads must stay flat. Then runs with faults, restarted after each of them,
which must end with the first one's losses and weights to the bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from mpbridge.common.probe import free_port
from mpbridge.planning.rules.table import rules
from mpbridge.settings.container import ConfigContainer
from mpbridge.training.base import Hook
from mpbridge.training.checkpoint import store
from mpbridge.training.loop import pretrain

SEQ, VOCAB, RANKS = 32, 64, 2
MODEL = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": VOCAB, "max_sequence_length": SEQ, "add_bias_linear": False,
    "position_embedding_type": "rope",
}  # fmt: skip
SIGNALS = {
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
    "hup": signal.SIGHUP,
    "usr1": signal.SIGUSR1,
    "usr2": signal.SIGUSR2,
}
KINDS = ("kill", "kill", "kill in a save", *SIGNALS, "notices", "no room", "reader", "hang", "cut", "flip", "delete")
"""Faults of a run; the last three damage its newest checkpoint after it was stopped."""
DAMAGE = ("cut", "flip", "delete")


class Text:
    """Counting sequences, the same on every iteration."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            yield {"tokens": (torch.randint(0, VOCAB, (1,), generator=generator) + torch.arange(SEQ + 1)) % VOCAB}


class Fault(Hook):
    """Applies the fault `kind` to this process after step `at`."""

    def __init__(self, kind: str, at: int, delay: float) -> None:
        self.kind, self.at, self.delay = kind, at, delay

    def stepped(self, training: Any, result: Any) -> None:
        if training.counters.iteration != self.at:
            return
        if self.kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.kind])
        elif self.kind == "notices":
            for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2) * 3:
                os.kill(os.getpid(), number)
        elif self.kind.startswith("kill"):
            # the kernel's timer ends the process wherever it is; no Python code needs to run
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self.delay)
        elif self.kind == "no room":
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        elif self.kind == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind in (*DAMAGE, "reader"):
            # training continues without a reader: it is stopped here so that the remaining faults can follow
            os.kill(os.getpid(), signal.SIGTERM)


class Told(Hook):
    """Writes the loss of each step, the process's resources along the way, and the final state's digest to a file of JSON lines."""

    def __init__(self, out: Path, every: int) -> None:
        self.out, self.every = out, every

    def say(self, **facts: Any) -> None:
        with self.out.open("a") as stream:
            stream.write(json.dumps(facts) + "\n")

    def stepped(self, training: Any, result: Any) -> None:
        at = training.counters.iteration
        self.say(step=at, loss=result.loss.hex(), **(held() if at % self.every == 0 else {}))

    def finished(self, training: Any) -> None:
        self.say(end=training.counters.iteration, digest=digest(training))


def digest(training: Any) -> str:
    """Of the weights and moments of this rank, to the bit."""
    found = hashlib.sha256()
    for one in sorted(training.engine.tensors(), key=lambda live: (live.role, live.parameter)):
        if one.role in ("params", "main_params", "exp_avg", "exp_avg_sq"):
            found.update(one.tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def held() -> dict[str, int]:
    """The current resources of this process: KiB of resident memory, descriptors, threads."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "memory": int(status["VmRSS"].split()[0]),
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def made(folder: Path, steps: int, interval: int, background: bool) -> Any:
    """The run."""
    return ConfigContainer(
        mixed_precision="bf16_mixed",
        model=MODEL | {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2},
        optimizer={"lr": 1e-3},
        ddp={"use_distributed_optimizer": True},
        audit={"every": 50},
        train={"micro_batch_size": 1, "global_batch_size": 2, "train_iters": steps, "eval_interval": None, "threads": 1, "timeout_minutes": 0.5},
        checkpoint={"save": str(folder / "kept"), "load": str(folder / "kept"), "save_interval": interval, "keep_last": 3, "async_save": background},
        logger={"log_dir": str(folder)},
    ).resolved(world_size=RANKS)  # fmt: skip


def rank_main(rank: int, port: int, folder: Path, out: Path, plan: dict[str, Any]) -> None:
    """One process of the job; ends the process: 0 complete, 3 stopped, 1 an error, reported on stderr."""
    job = {"WORLD_SIZE": RANKS, "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in job.items()})
    code = 1
    with (folder / f"said.{rank}").open("w") as said:
        os.dup2(said.fileno(), 2)
        os.dup2(said.fileno(), 1)
    if plan["kind"] == "reader":
        read, write = os.pipe()
        os.close(read)
        os.dup2(write, 1)
    try:
        # ahead of the run's own hooks, so that a fault can strike in the save that follows
        hooks: list[Hook] = [Told(out, plan["every"])]
        if rank == plan["rank"] or plan["kind"] in ("reader", "no room"):
            hooks.append(Fault(plan["kind"], plan["at"], plan["delay"]))
        from mpbridge.training import loop

        default = loop.default_hooks
        loop.default_hooks = lambda *args: [*hooks, *default(*args)]
        run = made(folder, plan["steps"], plan["interval"], plan["background"])
        done = pretrain(run, dataset=Text(), quiet=plan["kind"] != "reader")
        code = 0 if done.iterations == plan["steps"] else 3
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def job(folder: Path, out: Path, plan: dict[str, Any], limit: float) -> list[int]:
    """Exit codes of the processes of one attempt; processes that hang are killed when the others have ended."""
    port = free_port()
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=rank_main, args=(rank, port, folder, out.with_suffix(f".{rank}"), plan))
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    stop, left = time.monotonic() + limit, None
    while any(process.is_alive() for process in processes) and time.monotonic() < stop:
        if any(not process.is_alive() for process in processes):
            left = left or time.monotonic()
            if time.monotonic() - left > (
                5 if plan["kind"] == "hang" else 90
            ):  # a stopped process ends by SIGKILL only
                break
        time.sleep(0.02)
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    for process in processes:
        process.join()
    if late and plan["kind"] != "hang":
        raise RuntimeError(f"{len(late)} processes did not end ({plan})")
    codes = [int(process.exitcode or 0) for process in processes]
    for process in processes:
        process.close()
    return codes


def lines(out: Path, rank: int) -> list[dict[str, Any]]:
    """A rank's records from all attempts, without lines truncated by a kill."""
    found = []
    for line in out.with_suffix(f".{rank}").read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def damage(place: Path, kind: str, dice: random.Random) -> str:
    """Damages one file of a checkpoint; returns its name."""
    file = dice.choice(sorted(entry for entry in place.iterdir() if entry.name != "manifest.json"))
    data = bytearray(file.read_bytes())
    if kind == "delete":
        file.unlink()
    elif kind == "cut":
        file.write_bytes(data[: len(data) // 2])
    else:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        file.write_bytes(data)
    return file.name


def growth(rows: list[dict[str, Any]]) -> dict[str, float]:
    """A process's resources at the end relative to those after the first tenth of its steps."""
    seen = [row for row in rows if "memory" in row]
    early, late = seen[len(seen) // 10], seen[-1]
    return {name: round(late[name] / early[name], 3) for name in ("memory", "threads", "descriptors")}


class Soak:
    """A run without faults, then the same run with them, in one temporary folder."""

    def __init__(self, steps: int, faults: int, seed: int, interval: int, base: Path, say: Any) -> None:
        self.dice, self.base, self.interval, self.say = random.Random(seed), base, interval, say
        self.folders = {name: base / name for name in ("whole", "faulty")}
        self.plan: dict[str, Any] = {
            "steps": steps,
            "interval": interval,
            "background": True,
            "kind": "",
            "rank": -1,
            "at": 0,
            "delay": 0.0,
            "every": max(1, steps // 40),
        }
        self.limit, self.count, self.attempts = 60 + 2.0 * steps, dict.fromkeys(KINDS, 0), 0
        self.at = sorted(self.dice.sample(range(2, steps), min(faults, steps - 2)))

    def job(self, name: str, **changes: Any) -> list[int]:
        """Exit codes of the ranks of one start of that run."""
        return job(self.folders[name], self.base / f"{name}.told", self.plan | changes, self.limit)

    def whole(self) -> list[dict[str, float]]:
        """Runs without faults; returns the growth of each rank's process."""
        codes = self.job("whole")
        if codes != [0] * RANKS:
            said = (self.folders["whole"] / "said.0").read_text()[-3000:]
            raise RuntimeError(f"the run without faults ended with {codes}: {said}")
        return [growth(lines(self.base / "whole.told", rank)) for rank in range(RANKS)]

    def draw(self, done: int) -> tuple[str, int]:
        """The next fault and its step."""
        if not self.at:
            return "", 0
        kind, where = self.dice.choice(KINDS), max(self.at.pop(0), done + 1)
        if kind == "hang" and self.count["hang"] >= 2:
            kind = "kill"  # half a minute each
        if kind == "kill in a save":
            where = (where // self.interval + 1) * self.interval
        self.count[kind] += 1
        return kind, where

    def start(self) -> bool:
        """Starts the faulty run once with its fault; returns whether it reached its end."""
        kept = self.folders["faulty"] / "kept"
        newest = store.saved(kept)
        kind, where = self.draw(newest[0].step if newest else 0)
        self.plan |= {
            "kind": kind,
            "at": where,
            "rank": self.dice.randrange(RANKS),
            "delay": self.dice.uniform(0.001, 0.06),
            "background": self.dice.random() < 0.5,
        }
        codes = self.job("faulty")
        self.attempts += 1
        newest = store.saved(kept)
        for entry in newest[:1]:
            store.check(entry.path)
        self.say(f"{kind or 'no fault'} at {where}: exit codes {codes}, newest {newest[0].step if newest else 0}")
        if kind in DAMAGE and newest and codes != [0] * RANKS:
            self.damaged(newest[0].path, kind)
        return codes == [0] * RANKS

    def damaged(self, place: Path, kind: str) -> None:
        """Damages a checkpoint, checks that the next start names the damage, and removes the checkpoint."""
        name = damage(place, kind, self.dice)
        codes = self.job("faulty", kind="", rank=-1)
        told = (self.folders["faulty"] / "said.0").read_text()
        if codes != [1] * RANKS or str(place / name) not in told:
            raise RuntimeError(f"damage of {name} ({kind}) was not named: {codes} {told[-2000:]}")
        shutil.rmtree(place)

    def compare(self) -> None:
        """Raises RuntimeError if the faulty run's losses or its final digest differ from those of the run without faults."""
        for rank in range(RANKS):
            whole, faulty = lines(self.base / "whole.told", rank), lines(self.base / "faulty.told", rank)
            expected = {row["step"]: row["loss"] for row in whole if "step" in row}
            wrong = [row["step"] for row in faulty if "step" in row and row["loss"] != expected[row["step"]]]
            if wrong or whole[-1] != faulty[-1] or "digest" not in whole[-1]:
                raise RuntimeError(f"rank {rank} differs: steps {wrong[:5]}, ends {whole[-1]} and {faulty[-1]}")


def soak(
    steps: int, faults: int, *, seed: int = 0, interval: int = 10, room: Path | None = None, say: Any = print
) -> dict[str, Any]:
    """The figures of a run with `faults` faults; raises RuntimeError at the first loss of data."""
    torch.set_num_threads(1)
    rules()  # imported here, once
    began, base = time.monotonic(), Path(tempfile.mkdtemp(prefix="mpbridge-soak-", dir=room))
    try:
        run = Soak(steps, faults, seed, interval, base, say)
        for folder in run.folders.values():
            folder.mkdir()
        flat = run.whole()
        say(f"uninterrupted: {steps} steps in {time.monotonic() - began:.0f} s; end / first tenth: {flat}")
        while not run.start():
            pass
        run.compare()
        seen = {kind: times for kind, times in run.count.items() if times}
        seconds = round(time.monotonic() - began, 1)
        return {"steps": steps, "attempts": run.attempts, "faults": seen, "flat": flat, "lost": 0, "seconds": seconds}
    finally:
        shutil.rmtree(base, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--interval", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(json.dumps(soak(args.steps, args.faults, seed=args.seed, interval=args.interval)))


if __name__ == "__main__":
    sys.exit(main())
