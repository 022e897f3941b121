"""A job of two ranks of which one dies or stops answering, the same run twice, and where a run writes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpbridge.train import store
from tests.train.survival import go, run

ROOT = Path(__file__).parents[2]
RANK = """
import os, signal, sys
from mpbridge.cli.main import main
from mpbridge.train import store
from tests.train.survival import Hook, Text, run
from mpbridge.errors import MpbridgeError
class Fault(Hook):
    def stepped(self, training, result):
        print("step", training.counters.iteration, flush=True)
        if training.counters.iteration == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.{signal})
from mpbridge.train.loop import pretrain
try:
    kept = {{"save": {save!r}}} if {save!r} else {{}}
    pretrain(run(world=2, iters=50, train={{"timeout_minutes": {minutes}}}, checkpoint=kept), dataset=Text(), hooks=[Fault()], quiet=True)
except MpbridgeError as error:
    print(type(error).__name__, error, file=sys.stderr, flush=True)
    os._exit(error.exit_code)
"""


@pytest.mark.parametrize(("number", "minutes"), [pytest.param("SIGKILL", 10, id="dies"), pytest.param("SIGSTOP", 0.1, id="does not answer")])
def test_the_other_rank_ends_with_a_message(number, minutes):
    with ranks(number, minutes) as (first, _):
        out, err = first.communicate(timeout=120)
        assert first.returncode == 1, out + err[-4000:]
        assert "LostRank rank 0: another rank of the job died or does not answer" in err
        assert "checkpoint.load" in err
        assert out.split("\n")[:2] == ["step 1", "step 2"]


def test_a_signal_to_one_rank_stops_both_behind_the_same_step(tmp_path):
    with ranks("SIGTERM", 10, str(tmp_path)) as both:
        for process in both:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, out + err[-4000:]
            # the hook speaks behind step 2, so the step that is finished is the third
            assert out.split("\n")[:-1] == ["step 1", "step 2", "step 3"]
    assert [saved.step for saved in store.saved(tmp_path)] == [3]


@contextmanager
def ranks(number, minutes, save=""):
    """Two processes of one job; the second sends itself a signal behind step 2."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        command = [sys.executable, "-W", "ignore", "-c", RANK.format(signal=number, minutes=minutes, save=save)]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        yield started
    finally:
        for process in started:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(10)
            process.stdout.close()
            process.stderr.close()


@pytest.mark.parametrize("recipe", ["fp32", "bf16_mixed"])
def test_the_same_run_twice_has_the_same_losses_to_the_bit(recipe):
    first, second = (go(run(recipe, train={"deterministic": True})) for _ in range(2))
    assert first.losses == second.losses
    assert first.digest == second.digest
    other = go(run(recipe, train={"deterministic": True, "seed": 5}))
    assert other.losses != first.losses


WRITES = """
import json, os, sys
opened = set()
def note(event, args):
    if event == "open" and args[0] is not None and isinstance(args[0], (str, bytes, os.PathLike)):
        path, mode, flags = args
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            opened.add(os.path.realpath(os.fsdecode(path)))
    elif event in ("os.mkdir", "os.rename", "os.symlink", "shutil.rmtree"):  # what rmtree removes is named by its folder
        opened.update(os.path.realpath(os.fsdecode(part)) for part in args[:2] if isinstance(part, (str, bytes, os.PathLike)))
from mpbridge.train import store
from tests.train.survival import Text, run
from mpbridge.train.loop import pretrain
import torch, megatron.core
sys.dont_write_bytecode = True
sys.addaudithook(note)
os.chdir(sys.argv[1])
stages = [{"recipe": "fp32", "until": 2}, {"recipe": "bf16_mixed"}]
kept = {"save": "run/kept", "load": "run/kept", "save_interval": 1, "keep_last": 2}
for steps, background in ((3, False), (6, True)):
    pretrain(run(stages, train={"exit_interval": steps}, checkpoint=kept | {"async_save": background}, logger={"log_dir": "run"}), dataset=Text(), quiet=True)
print(json.dumps(sorted(opened)))
"""


def test_nothing_is_written_outside_of_the_runs_folder(tmp_path, tmp_path_factory):
    # (torch's compiler keeps a cache where its own variable says)
    compiler = str(tmp_path_factory.mktemp("compiler").resolve())
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": compiler}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WRITES, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    opened = json.loads(done.stdout.splitlines()[-1])
    inside = str((tmp_path / "run").resolve())
    assert any(path.startswith(inside) for path in opened)
    outside = [path for path in opened if not path.startswith(inside) and not path.startswith(("/dev/", "/proc/", compiler))]
    assert not outside
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


