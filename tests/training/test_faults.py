"""What goes wrong, and how the run ends then: signals, non-finite numbers, damaged or unwritable checkpoints, a rank that is gone."""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time

import pytest

from mpbridge.common.errors import BadValue, CheckpointError, Contradiction, DataError
from mpbridge.common.report.metrics import EVENTS
from mpbridge.settings.training import parse_nonfinite
from mpbridge.training import loop
from mpbridge.training.checkpoint import store
from tests.forked import forked
from tests.training.survival import Hook, go, run


class Poison(Hook):
    """Makes the gradients of the given steps NaN; each step once."""

    def __init__(self, *steps):
        self.steps, self.hook = list(steps), None

    def started(self, training):
        self._next(training)

    def stepped(self, training, result):
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
        self._next(training)

    def _next(self, training):
        if training.counters.iteration + 1 in self.steps:
            self.steps.remove(training.counters.iteration + 1)
            _, parameter = next(iter(training.engine.named_parameters()))
            self.hook = parameter.register_hook(lambda grad: grad * float("nan"))


def events(folder):
    return [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]


@pytest.mark.parametrize("recipe", ["bf16_mixed", "fp32"])
def test_a_nonfinite_step_is_skipped_counted_and_logged(tmp_path, recipe):
    watch = go(run(recipe, logger={"log_dir": str(tmp_path)}), Poison(3, 4))
    assert sorted(watch.losses) == [1, 2, 3, 4, 5, 6]
    assert watch.summary.nonfinite == watch.summary.skipped == 2
    assert [(event["iteration"], event["event"]) for event in events(tmp_path)] == [(3, "nonfinite"), (4, "nonfinite")]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["nonfinite_steps"] for row in rows] == [0, 0, 1, 2, 2, 2]
    assert watch.losses[6] < watch.losses[1]


def test_a_nonfinite_step_stops_the_run(tmp_path):
    kept, log = {"save": str(tmp_path / "kept")}, {"log_dir": str(tmp_path)}
    watch = go(run(train={"nonfinite": "stop"}, checkpoint=kept, logger=log), Poison(3))
    assert sorted(watch.losses) == [1, 2, 3]
    assert watch.summary.stopped == "step 3 is not finite"
    assert store.saved(tmp_path / "kept")[0].step == 3


def test_a_nonfinite_step_goes_back_and_on_behind_its_data(tmp_path):
    kept = {"save": str(tmp_path / "kept"), "save_interval": 2}
    watch = go(run(train={"nonfinite": "rollback 1"}, checkpoint=kept, logger={"log_dir": str(tmp_path)}), Poison(4))
    assert watch.summary.iterations == 6
    assert watch.summary.nonfinite == 1
    # steps 1, 2, 3, 4 (not finite), then 3, 4, 5, 6 again, all on samples of their own
    assert watch.summary.consumed_samples == 8 * 4
    back = events(tmp_path)[0]
    assert (back["event"], back["iteration"]) == ("rollback", 2)
    assert "0 rollbacks left" in back["text"]


def test_a_rollback_before_the_first_save_stays_on_its_branch(tmp_path):
    kept = {"save": str(tmp_path), "save_interval": 2}
    go(run(checkpoint=kept))  # saves behind steps 2, 4 and 6
    back = {"load": str(tmp_path / "step_00000002"), "save": str(tmp_path), "save_interval": 4}
    watch = go(run(iters=4, train={"nonfinite": "rollback 1"}, checkpoint=back), Poison(3))
    assert list(watch.losses) == [2, 3, 4]
    elsewhere = {"load": str(tmp_path / "step_00000004"), "save": str(tmp_path / "two"), "save_interval": 4}
    watch = go(run(train={"nonfinite": "rollback 1"}, checkpoint=elsewhere), Poison(5))
    assert watch.summary.stopped == "not finite, and there is no checkpoint to roll back to"


def test_a_rollback_in_the_step_that_ends_the_run_keeps_the_place_in_the_data(tmp_path):
    kept = {"save": str(tmp_path), "load": str(tmp_path), "save_interval": 2}
    stops = {"nonfinite": "rollback 1", "exit_interval": 4}
    assert go(run(train=stops, checkpoint=kept), Poison(4)).summary.consumed_samples == 4 * 4
    assert go(run(checkpoint=kept)).summary.consumed_samples == 8 * 4


def test_no_more_rollbacks_than_allowed(tmp_path):
    kept = {"save": str(tmp_path / "kept"), "save_interval": 2}
    watch = go(run(train={"nonfinite": "rollback 1"}, checkpoint=kept), Poison(4, 5))
    assert watch.summary.stopped == "not finite, and no rollback is left"


@pytest.mark.parametrize("setting", ["rollback", "rollback 0", "rollback -1", "ignore", "", 3])
def test_nonfinite_settings_that_mean_nothing_are_refused(setting):
    with pytest.raises(BadValue, match=r"train.nonfinite=.*expected 'skip', 'stop' or 'rollback N'"):
        parse_nonfinite(setting)


def test_rollback_without_checkpoints_is_refused():
    with pytest.raises(Contradiction, match=r"checkpoint\.save"):
        go(run(train={"nonfinite": "rollback 2"}))


class Doubts(Hook):
    """Finds behind step 2 that what was called good since step 1 was not."""

    def stepped(self, training, result):
        training.audit = "good"
        if training.counters.iteration == 2:
            training.doubt(after=1)


@pytest.mark.parametrize("background", [False, True])
def test_what_is_doubted_while_it_is_written_is_suspect(tmp_path, background):
    kept = {"save": str(tmp_path), "save_interval": 2, "async_save": background}
    go(run(iters=4, checkpoint=kept), Doubts())
    assert {one.step: store.audit_of(one.path) for one in store.saved(tmp_path)} == {2: "suspect", 4: "good"}


class Leaves(Hook):
    """Changes the working directory behind step 3, or fails there."""

    def __init__(self, folder=None):
        self.folder = folder

    def stepped(self, training, result):
        if training.counters.iteration == 3:
            if self.folder is None:
                raise KeyError("a hook's own fault")
            os.chdir(self.folder)


def test_a_change_of_the_working_directory_moves_no_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    stages = [{"recipe": "fp32", "until": 4}, {"recipe": "bf16_mixed"}]
    go(run(stages, checkpoint={"save": "kept", "save_interval": 2}, logger={"log_dir": "log"}), Leaves("other"))
    assert [one.step for one in store.saved(tmp_path / "kept")] == [6, 4, 2]
    assert (tmp_path / "log" / "summary.json").exists()
    assert not os.listdir(tmp_path / "other")


def test_a_checkpoint_that_was_not_finished_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("mpbridge.training.checkpoint.io.Writing.done", lambda writing: False)
    with pytest.raises(KeyError, match="own fault"):
        go(run(checkpoint={"save": str(tmp_path), "save_interval": 3, "async_save": True}), Leaves())
    assert os.listdir(tmp_path) == []


def test_a_run_that_is_refused_for_its_data_leaves_nothing(tmp_path, monkeypatch):
    def refused(*_):
        raise DataError("packing failed")

    monkeypatch.setattr(loop, "Feed", refused)
    for kept, log in (("kept/there", "log"), ("kept", "kept"), ("kept", "kept/log"), ("log/kept", "log")):
        made = run(checkpoint={"save": str(tmp_path / kept)}, logger={"log_dir": str(tmp_path / log)})
        with pytest.raises(DataError, match="packing failed"):
            go(made)
        assert os.listdir(tmp_path) == []


class Signal(Hook):
    """Sends this process a signal while a step is under way."""

    def __init__(self, number, at):
        self.number, self.at = number, at

    def stepped(self, training, result):
        if training.counters.iteration == self.at:
            os.kill(os.getpid(), self.number)


# the others: test_survives.py
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_behind_its_step_with_a_checkpoint(tmp_path, number):
    kept = {"save": str(tmp_path / "kept"), "load": str(tmp_path / "kept")}
    before = signal.getsignal(number)
    watch = go(run(checkpoint=kept, logger={"log_dir": str(tmp_path)}, iters=4), Signal(number, 1))
    # the hook speaks behind step 1, so the step that is finished is the second
    assert sorted(watch.losses) == [1, 2]
    assert watch.summary.stopped == number.name
    assert f"checkpoint.load={tmp_path / 'kept'}" in watch.summary.notes["go on with"]
    assert signal.getsignal(number) is before
    assert store.saved(tmp_path / "kept")[0].step == 2
    if number == signal.SIGTERM:
        assert go(run(checkpoint=kept, iters=4)).losses.keys() == {3, 4}


def test_the_line_that_resumes_drops_no_states_again(tmp_path):
    go(run(iters=2, checkpoint={"save": str(tmp_path / "old")}))
    kept = {"save": str(tmp_path / "kept"), "load": str(tmp_path / "old"), "reset_optimizer": True}
    watch = go(run(iters=4, train={"exit_interval": 3}, checkpoint=kept))
    words = watch.summary.notes["go on with"].split()
    assert words[-2:] == [f"checkpoint.load={tmp_path / 'kept'}", "checkpoint.reset_optimizer=false"]


class Slow(Hook):
    """Tells each step, and takes its time."""

    def __init__(self, seconds):
        self.seconds = seconds

    def stepped(self, training, result):
        print("step", training.counters.iteration, flush=True)
        time.sleep(self.seconds)


def train(kept, iters, seconds=0.0, largest=None, **section):
    """What a process of its own does. largest: bytes of a file that it may write."""
    if largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    watch = go(run(iters=iters, checkpoint={"save": str(kept), "load": str(kept)} | section), Slow(seconds))
    print("done", watch.summary.stopped)


def test_a_second_signal_ends_at_once(tmp_path):
    with forked(train, tmp_path, 1000, 600.0) as process:
        process.wait_for("step 1")
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.5)  # the hook sleeps on: the first signal does not break a step
        assert process.process.is_alive()
        began = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(300) == -signal.SIGTERM
        assert time.monotonic() - began < 300  # the step would have gone on for ten minutes


def test_a_second_job_is_kept_out_of_the_folder_until_the_first_is_killed(tmp_path):
    kept = {"save": str(tmp_path), "load": str(tmp_path)}
    with forked(train, tmp_path, 1000, 0.05, None) as first:
        first.wait_for("step 1")
        holder = rf"process {first.pid} on {re.escape(socket.gethostname())}"
        with pytest.raises(CheckpointError, match=f"{holder} is writing its run"):
            go(run(checkpoint=kept))
        os.kill(first.pid, signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
    # its name is still in the file, and blocks nobody
    assert f"process {first.pid}" in (tmp_path / store.WRITER).read_text()
    assert sorted(go(run(iters=2, checkpoint=kept)).losses) == [1, 2]


def test_a_second_job_writes_no_lines_among_those_of_the_first(tmp_path):
    log, lines = {"log_dir": str(tmp_path)}, tmp_path / "metrics.jsonl"
    made = tmp_path / "precision.json"
    with forked(go, run(iters=1000, logger=log)) as first:
        while not (lines.exists() and lines.stat().st_size):
            assert first.process.is_alive()
            time.sleep(0.02)
        began, text = made.stat().st_mtime_ns, lines.read_text()
        said = rf"process {first.pid} on .* is writing its run to {tmp_path}: .*choose another logger\.log_dir"
        with pytest.raises(CheckpointError, match=said):
            go(run("fp32", logger=log))
        assert made.stat().st_mtime_ns == began
        assert lines.read_text().startswith(text)
        os.kill(first.pid, signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
    kept = {"save": str(tmp_path), "load": str(tmp_path)}
    for steps in (2, 3):
        go(run(iters=steps, checkpoint=kept, logger=log))
    assert [json.loads(line)["iteration"] for line in lines.read_text().splitlines()] == [1, 2, 3]


class Nested(Hook):
    """After each step, trains another run in the same process."""

    def __init__(self, other):
        self.other = other

    def stepped(self, training, result):
        said = rf"process {os.getpid()} on .* is writing its run to .*: wait for it"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "Feed", lambda *_: pytest.fail("its data was packed"))
            with pytest.raises(CheckpointError, match=said):
                go(self.other)


class ClaimsAtTheEnd(Hook):
    """Tries to take the run's folder when hooks are closed."""

    def __init__(self, folder):
        self.folder, self.refused = folder, False

    def closed(self):
        with pytest.raises(CheckpointError, match="is writing its run to"), store.claim(self.folder):
            pass
        self.refused = True


def test_the_folder_stays_the_runs_own_until_its_hooks_are_closed(tmp_path):
    hook = ClaimsAtTheEnd(tmp_path)
    go(run(iters=1, checkpoint={"save": str(tmp_path)}), hook)
    assert hook.refused
    with store.claim(tmp_path):
        pass


@pytest.mark.parametrize(("section", "name"), [("logger", "log_dir"), ("checkpoint", "save")])
def test_a_run_that_another_starts_in_its_process_is_kept_out_of_its_folder(tmp_path, section, name):
    made = run(iters=2, **{section: {name: str(tmp_path)}})
    assert sorted(go(made, Nested(made)).losses) == [1, 2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run's folder with checkpoints behind steps 2 and 4."""
    folder = tmp_path_factory.mktemp("whole")
    go(run(iters=4, checkpoint={"save": str(folder), "save_interval": 2}))
    return folder


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize(
    "name", ["__0_0.distcp", "index.json", "state.json", "precision.json"]
)  # what else is damage, test_store.py has
def test_damage_is_named_and_the_one_before_goes_on(whole, tmp_path, name):
    kept = shutil.copytree(whole, tmp_path / "kept", symlinks=True)
    damaged = kept / "step_00000004" / name
    flip(damaged)
    with pytest.raises(CheckpointError) as told:
        go(run(iters=6, checkpoint={"load": str(kept)}))
    assert str(damaged) in str(told.value)
    offered = str(told.value).rpartition("checkpoint.load=")[2]
    assert offered == str(kept / "step_00000002")
    if name == "state.json":
        assert sorted(go(run(iters=4, checkpoint={"load": offered})).losses) == [3, 4]


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_said_and_leaves_no_half(tmp_path, background):
    # a limit on the size of files stands for the disk: the same writes fail, with EFBIG in place of ENOSPC
    kept = tmp_path / "kept"
    with forked(functools.partial(train, kept, 4, largest=300_000, save_interval=2, async_save=background)) as process:
        assert process.wait() == 1, process.text
    assert "CheckpointError: a checkpoint could not be written to" in process.text
    assert "iB free there" in process.text
    assert "file system is full (disk" in process.text
    assert not kept.exists()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB: room for one checkpoint of 1.2 MiB, not for two."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    try:
        subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no right to mount a file system here; the limit on file sizes above stands for it")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_fills_up_keeps_the_checkpoint_before(small_disk, background):
    kept = {"save": str(small_disk / "kept"), "save_interval": 2, "async_save": background}
    with pytest.raises(CheckpointError, match="could not be written") as told:
        go(run("fp32", iters=6, checkpoint=kept))
    assert "file system is full (disk" in str(told.value)
    assert f"the latest complete one is {small_disk / 'kept' / 'step_00000002'}" in str(told.value)
    assert sorted(os.listdir(small_disk / "kept")) == ["latest", "step_00000002"]
    assert sorted(go(run("fp32", iters=4, checkpoint={"load": str(small_disk / "kept")})).losses) == [3, 4]
