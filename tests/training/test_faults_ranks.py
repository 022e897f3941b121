"""A job of two ranks of which one dies or stops answering, the same run twice, and where a run writes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from mpbridge.common.errors import MpbridgeError
from mpbridge.training.checkpoint import store
from mpbridge.training.loop import pretrain
from tests.forked import codes, forked, ranks, said
from tests.training.survival import Hook, Text, go, run


class Fault(Hook):
    """Sends the second of two ranks a signal behind step 2."""

    def __init__(self, number):
        self.number = number

    def stepped(self, training, result):
        print("step", training.counters.iteration, flush=True)
        if training.counters.iteration == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), self.number)


def train(number, minutes, save):
    """What each rank does."""
    made = run(world=2, iters=50, train={"timeout_minutes": minutes}, checkpoint={"save": save} if save else {})
    try:
        pretrain(made, dataset=Text(), hooks=[Fault(number)], quiet=True)
    except MpbridgeError as error:
        print(type(error).__name__, error, flush=True)
        os._exit(error.exit_code)


@pytest.mark.parametrize(
    ("number", "minutes"),
    [pytest.param(signal.SIGKILL, 10, id="dies"), pytest.param(signal.SIGSTOP, 0.2, id="does not answer")],
)
def test_the_other_rank_ends_with_a_message(number, minutes):
    with ranks(2, train, number, minutes, None) as (first, _):
        assert first.wait() == 1, first.text
    assert first.text.split("\n")[:2] == ["step 1", "step 2"]
    assert "LostRank rank 0: another rank of the job died or does not answer" in first.text
    assert "checkpoint.load" in first.text


def test_a_signal_to_one_rank_stops_both_behind_the_same_step(tmp_path):
    with ranks(2, train, signal.SIGTERM, 10, str(tmp_path)) as both:
        assert not any(codes(both)), said(both)
        for one in both:
            # the hook speaks behind step 2, so the step that is finished is the third
            assert one.text.split("\n")[:-1] == ["step 1", "step 2", "step 3"]
    assert [saved.step for saved in store.saved(tmp_path)] == [3]


def alone(folder, stages):
    """What each rank does where the second of them sees no checkpoint in the folder, as on a node without that file system."""
    if os.environ["RANK"] == "1":
        store.saved = lambda folder: []
        names, resolve = itertools.count(), Path.resolve
        Path.resolve = lambda path: path / str(next(names)) if torch.distributed.is_initialized() else resolve(path)
    made = run(
        stages or "fp32", world=2, iters=3, checkpoint={"save": folder, "load": folder}, train={"timeout_minutes": 1}
    )
    try:
        print("from", pretrain(made, dataset=Text(), quiet=True).notes["resumed from"], flush=True)
    except MpbridgeError as error:
        print(type(error).__name__, error, flush=True)


@pytest.mark.slow
def test_a_rank_that_sees_no_checkpoint_does_not_begin_anew(tmp_path):
    stages = [{"recipe": "fp32", "until": 2}, {"recipe": "bf16_mixed"}]
    go(run("fp32", iters=3, train={"global_batch_size": 4}, checkpoint={"save": str(tmp_path)}))
    for given, word in ((None, f"from {tmp_path}"), (stages, "AuditFailed ranks disagree on the precision policy")):
        with ranks(2, alone, str(tmp_path), given) as both:
            assert codes(both) == [0, 0], said(both)
            assert all(one.text.startswith(word) for one in both), said(both)


def test_the_same_run_twice_has_the_same_losses_to_the_bit():
    first, second, other = (go(run(iters=4, train={"deterministic": True} | seed)) for seed in ({}, {}, {"seed": 5}))
    assert first.losses == second.losses
    assert first.digest == second.digest
    assert other.losses != first.losses


def write(folder):
    """Trains, saves, prunes and resumes in `folder`/run, and prints every path that was opened for writing, made, renamed or removed."""
    opened = set()

    def note(event, args):
        if event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
            path, _, flags = args
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                opened.add(os.path.realpath(os.fsdecode(path)))
        elif event in (
            "os.mkdir",
            "os.rename",
            "os.symlink",
            "shutil.rmtree",
        ):  # which names the folder that it removes
            paths = [part for part in args[:2] if isinstance(part, (str, bytes, os.PathLike))]
            opened.update(os.path.realpath(os.fsdecode(part)) for part in paths)

    sys.dont_write_bytecode = True
    # the first to ask where temporary files go makes Python try the place out, and torch's compiler asks when it is loaded
    tempfile.gettempdir()
    sys.addaudithook(note)
    os.chdir(folder)
    stages = [{"recipe": "fp32", "until": 2}, {"recipe": "bf16_mixed"}]
    kept = {"save": "run/kept", "load": "run/kept", "save_interval": 1, "keep_last": 2}
    for steps, background in ((3, False), (6, True)):
        how = {"train": {"exit_interval": steps}, "checkpoint": kept | {"async_save": background}}
        go(run(stages, logger={"log_dir": "run"}, **how))
    print(json.dumps(sorted(opened)))


def test_nothing_is_written_outside_of_the_runs_folder(tmp_path, tmp_path_factory):
    # (torch's compiler keeps a cache where its own variable says)
    compiler = str(tmp_path_factory.mktemp("compiler").resolve())
    with forked(write, tmp_path, environment=os.environ | {"TORCHINDUCTOR_CACHE_DIR": compiler}) as process:
        assert process.wait() == 0, process.text
    opened = json.loads(process.text.splitlines()[-1])
    inside = str((tmp_path / "run").resolve())
    assert any(path.startswith(inside) for path in opened)
    assert not [path for path in opened if not path.startswith((inside, "/dev/", "/proc/", compiler))]
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
