"""What a run outlives: every notice that a scheduler gives, a launcher that dies, a reader that goes away, a file that cannot grow."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mpbridge.cli.main import entry, main
from mpbridge.common.errors import CheckpointError, Refused
from mpbridge.common.report.metrics import read
from mpbridge.training import loop, process
from mpbridge.training.checkpoint import store
from mpbridge.training.loop import pretrain
from mpbridge.training.process import Signals
from tests.forked import forked
from tests.training.survival import Hook, Text, go, run
from tests.training.test_faults import Signal, events
from tests.training.tiny import tiny

ROOT = Path(__file__).resolve().parents[2]
NOTICES = [signal.SIGUSR2, signal.SIGHUP, signal.SIGUSR1]


class Often(Hook):
    """Sends notices again and again behind step 1."""

    def stepped(self, training, result):
        if training.counters.iteration == 1:
            for number in NOTICES * 3:
                os.kill(os.getpid(), number)


def test_repeated_notices_do_not_end_the_run_at_once(tmp_path):
    before = [signal.getsignal(number) for number in NOTICES]
    watch = go(run(checkpoint={"save": str(tmp_path)}, iters=4), Often())
    assert watch.summary.stopped == "SIGUSR2"
    assert [signal.getsignal(number) for number in NOTICES] == before
    assert store.saved(tmp_path)[0].step == 2


def test_a_signal_that_was_inherited_as_ignored_stays_ignored():
    number = signal.SIGINT
    before = signal.signal(number, signal.SIG_IGN)
    try:
        watch = go(run(iters=3), Signal(number, 1))
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert watch.summary.stopped is None
    assert sorted(watch.losses) == [1, 2, 3]


def test_under_torchrun_a_signal_that_comes_twice_at_once_does_not_insist(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    signals = Signals()
    signals._note(signal.SIGINT, None)
    signals._note(signal.SIGTERM, None)  # torchrun's, for the same key press
    assert signals.seen == signal.SIGINT
    assert signal.getsignal(signal.SIGTERM) is not None


@pytest.mark.parametrize("gone", [False, True])
def test_under_torchrun_a_launcher_that_is_gone_before_the_run_stands_is_noticed(monkeypatch, gone):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    if gone:  # another process than the one that started this one is the parent now
        monkeypatch.setattr(process, "_launcher", [os.getppid() + 1])
    signals = Signals()
    signals.built(None)
    try:
        assert bool(signals.seen) is gone
    finally:
        signals.closed()


def test_a_notice_that_comes_again_while_the_summary_is_written_ends_nothing(monkeypatch):
    real = loop.write_summary

    def noticed(*args):
        os.kill(os.getpid(), signal.SIGUSR1)
        real(*args)

    monkeypatch.setattr(loop, "write_summary", noticed)
    assert go(run(iters=5), Signal(signal.SIGUSR1, 2)).summary.stopped == "SIGUSR1"


class Steps(Hook):
    """Writes a line to a file for each step, and takes its time."""

    def __init__(self, file, seconds):
        self.file, self.seconds = file, seconds

    def stepped(self, training, result):
        with open(self.file, "a") as out:
            print(os.getpid(), training.counters.iteration, file=out)
        time.sleep(self.seconds)


RANK = """
import sys
from tests.training.survival import *
from tests.training.test_survives import Steps
import torch.distributed as dist
from mpbridge.training.loop import pretrain
made = run(world=2, iters=1000, checkpoint={"save": sys.argv[1]})
summary = pretrain(made, dataset=Text(), hooks=[Steps(sys.argv[2], 0.05)], quiet=True)
open(sys.argv[2] + ".end", "a").write(f"{summary.stopped}\\n")
"""


def _alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_a_launcher_that_is_killed_takes_its_ranks_with_it_after_they_saved(tmp_path):
    script, log = tmp_path / "rank.py", tmp_path / "steps"
    script.write_text(RANK)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = [str(script), str(tmp_path / "kept"), str(log)]
    launcher = subprocess.Popen([*command, *arguments], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL)
    try:
        stop = time.monotonic() + 200
        while not log.exists() or len(log.read_text().splitlines()) < 6:
            assert time.monotonic() < stop
            assert launcher.poll() is None
            time.sleep(0.1)
        launcher.kill()
        launcher.wait(10)
        ranks = {int(line.split()[0]) for line in log.read_text().splitlines()}
        assert len(ranks) == 2
        stop = time.monotonic() + 100
        while any(_alive(pid) for pid in ranks):
            assert time.monotonic() < stop, "ranks go on without their launcher"
            time.sleep(0.1)
    finally:
        launcher.kill()
        launcher.wait(10)
    assert (tmp_path / "steps.end").read_text() == "SIGHUP\n" * 2
    newest = store.saved(tmp_path / "kept")[0]
    assert newest.step == max(int(line.split()[1]) for line in log.read_text().splitlines())
    store.check(newest.path)


# --- exit codes --------------------------------------------------------------------------------------------------------------------------


def test_a_run_that_stopped_early_exits_with_3_and_a_whole_one_with_0(tmp_path):
    tiny(tmp_path).dump(tmp_path / "tiny.yaml")
    kept = [f"checkpoint.{way}={tmp_path / 'kept'}" for way in ("save", "load")]
    command = ["train", "--config", str(tmp_path / "tiny.yaml"), *kept]
    assert [main([*command, "train.exit_interval=4"]), main(command)] == [3, 0]


# --- readers, closed streams, full disks -------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path):
    tiny(tmp_path, train={"train_iters": 3, "log_interval": 1, "eval_interval": None}).dump(tmp_path / "tiny.yaml")
    return tmp_path / "tiny.yaml"


def no_stdout():
    """As an interpreter finds it that starts with it closed: the next file that is opened gets its number."""
    os.close(1)
    sys.stdout = None


def no_streams():
    os.close(1)
    os.close(2)
    sys.stdout = sys.stderr = None


def full():
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def reader_of_one_line():
    ours, theirs = os.pipe()
    os.dup2(theirs, 1)
    os.close(theirs)

    def read_one():
        with open(ours) as lines:
            lines.readline()

    threading.Thread(target=read_one).start()


def command(change, config):
    change()
    sys.argv = ["mpbridge", "train", "--config", str(config)]
    entry()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (no_stdout, ""),
        (no_streams, ""),
        (full, "standard output was closed (No space left on device); the run continues without it\n"),
        (reader_of_one_line, "standard output was closed (Broken pipe); the run continues without it\n"),
    ],
)
def test_a_stdout_that_takes_nothing_does_not_end_the_run(config, change, said):
    with forked(command, change, config, apart=True) as process:
        assert process.wait() == 0, process.errors
    assert process.errors == said
    assert [row["iteration"] for row in read(config.parent / "run" / "metrics.jsonl")] == [1, 2, 3]


class Shrink(Hook):
    """Lets no file grow beyond what the metrics are after step 2, during step 3."""

    def stepped(self, training, result):
        if training.counters.iteration == 2:
            self.limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            metrics = Path(training.run.logger["log_dir"]) / "metrics.jsonl"
            with metrics.open("a") as out:  # larger than any other file that is written meanwhile
                print(json.dumps({"iteration": 2, "pad": "x" * 400_000}), file=out)
            size = metrics.stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, self.limit[1]))
        if training.counters.iteration == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, self.limit)


def shrinking(folder):
    kept = {"save": f"{folder}/kept", "load": f"{folder}/kept"}
    made = run(iters=6, checkpoint=kept, logger={"log_dir": str(folder)})
    # before the others: the limit is lifted before the checkpoint is written
    default = loop.default_hooks
    loop.default_hooks = lambda *args: [Shrink(), *default(*args)]
    summary = pretrain(made, dataset=Text(), quiet=True)
    print("stopped", summary.stopped, "after", summary.iterations)


def test_a_metrics_file_that_cannot_grow_stops_the_run_behind_a_checkpoint(tmp_path):
    with forked(shrinking, tmp_path) as process:
        assert process.wait() == 0, process.text
    metrics = tmp_path / "metrics.jsonl"
    assert f"stopped {metrics} cannot be written (no room for a whole line) after 3" in process.text
    lost = next(line for line in process.text.splitlines() if "the missing line" in line)
    assert json.loads(lost.partition("the missing line: ")[2])["iteration"] == 3
    assert [row["iteration"] for row in read(metrics)] == [1, 2, 2]
    assert metrics.read_text().endswith("}\n")
    assert store.saved(tmp_path / "kept")[0].step == 3
    assert events(tmp_path)[-1]["event"] == "trouble"
    resumed = go(run(iters=6, checkpoint={"load": str(tmp_path / "kept")}, logger={"log_dir": str(tmp_path)}))
    assert sorted(resumed.losses) == [4, 5, 6]
    assert [row["iteration"] for row in read(metrics)] == [1, 2, 2, 4, 5, 6]


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_files_of_the_run_are_not_written_through_links(tmp_path, name):
    outside, folder = tmp_path / "precious", tmp_path / "run"
    outside.write_text("precious\n")
    folder.mkdir()
    (folder / name).symlink_to(outside)
    made = run(iters=2, logger={"log_dir": str(folder)}, checkpoint={"save": str(tmp_path / "kept")})
    if name == "metrics.jsonl":
        go(made)  # put in place of the link, as a new file
        assert not (folder / name).is_symlink()
    else:
        with pytest.raises(CheckpointError, match=r"events\.jsonl is a symbolic link"):
            go(made, Signal(signal.SIGTERM, 1))
    assert outside.read_text() == "precious\n"


def test_a_failure_in_the_middle_ends_behind_a_checkpoint_that_is_marked(tmp_path, monkeypatch):
    class Fails(Hook):
        def stepped(self, training, result):
            if training.counters.iteration == 2:
                training.audit = "good"
            if training.counters.iteration == 3:
                training.audit = "suspect"
                training.fail(Refused("audit: the weights of rank 1 stand still\nmore of it"))

    kept = {"save": str(tmp_path), "load": str(tmp_path), "save_interval": 1, "keep_last": 1}
    default = loop.default_hooks
    # after statistics and audit, before the checkpointer
    monkeypatch.setattr(loop, "default_hooks", lambda *args: [*(made := default(*args))[:2], Fails(), *made[2:]])
    with pytest.raises(Refused, match="stand still"):
        go(run(iters=6, checkpoint=kept))
    monkeypatch.undo()
    assert {entry.step: store.audit_of(entry.path) for entry in store.saved(tmp_path)} == {3: "suspect", 2: "good"}
    assert store.last_good(tmp_path).step == 2
    assert store.locate(tmp_path).name == "step_00000002"
    resumed = go(run(iters=4, checkpoint=kept))
    assert sorted(resumed.losses) == [3, 4]
    # the one that was named is taken all the same
    aside = next(tmp_path.glob("aside-step_00000003-*"))
    assert sorted(go(run(iters=4, checkpoint={"load": str(aside)})).losses) == [4]
