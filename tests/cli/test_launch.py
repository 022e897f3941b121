"""The Slurm script: what it asks for, that bash reads it, that it goes back into the queue after a notice and only then; Slurm's commands are played."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mpbridge.cli.launch import limit_seconds
from mpbridge.cli.main import main

TRAIN = ["train", "--config", "gpt_tiny", "checkpoint.save=runs/a"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]):
    def call(*options: str, command: list[str] = TRAIN, nodes: int = 2) -> str:
        assert main(["launch", "--nodes", str(nodes), "--gpus-per-node", "4", *options, "--", *command]) == 0
        return capsys.readouterr().out

    return call


def test_the_script_asks_slurm_for_what_was_asked(printed) -> None:
    asked = "--time 1-00 --notice 300 --name big --slurm partition=long --slurm account=me"
    text = printed(*asked.split())
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    wanted = {"job-name": "big", "nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "4", "time": "1-00", "signal": "B:USR1@300", "requeue": "", "partition": "long", "account": "me"}  # fmt: skip
    assert wanted.items() <= options.items()
    assert "--nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d" in text
    assert "checkpoint.load=runs/a" in text
    assert "container" not in text
    assert "gpus-per-node" not in printed("--cpu")


def test_an_image_is_handed_to_srun(printed) -> None:
    text = printed("--image", "registry#image:1", "--mount", "/data:/data")
    given = '--container-image=\'registry#image:1\' --container-mounts="$PWD",/data:/data --container-workdir="$PWD"'
    assert given in text
    assert "exec python -m torch.distributed.run" in text
    # Docker Hub's, and files
    for image in ("group/image:1", "/shared/image.sqsh", "./image.sqsh", "images.d/image.sqsh"):
        assert f"--container-image={image} " in printed("--image", image)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nodes", "2", "--", "train", "--config", "gpt_tiny"], "checkpoint.save is not set"),
        (["--nodes", "2", "--", *TRAIN, "train.global_batch_size=12"], "global_batch_size"),
        (["--nodes", "2", "--", "evaluate"], "expected train or a .py file"),
        (["--nodes", "0", "--", *TRAIN], "expected at least 1"),
        (["--nodes", "2", "--", *TRAIN, "checkpoint.load=begin"], "checkpoint.pretrained_checkpoint=begin"),
        (["--nodes", "2", "--", *TRAIN, "--reset-optimizer"], "after every time limit"),
        (["--nodes", "2", "--", *TRAIN, "checkpoint.reset_optimizer=true"], "after every time limit"),
        (["--nodes", "2", "--", "nowhere.py"], "no such file"),
        (["--nodes", "2", "--time", "soon", "--", *TRAIN], "--time 'soon'"),
        (["--nodes", "2", "--time", "1-2-3", "--", *TRAIN], "--time '1-2-3'"),
        (["--nodes", "2", "--time", "2", "--", *TRAIN], "is 120 seconds, so --notice 120"),
        (["--nodes", "2", "--notice", "70000", "--", *TRAIN], "at most 65535"),
        (["--nodes", "2", "--name", "a b", "--", *TRAIN], "--name 'a b'"),
        (["--nodes", "2", "--slurm", "time=3", "--", *TRAIN], "use --time instead"),
        (["--nodes", "2", "--slurm", "no-requeue", "--", *TRAIN], "by being requeued"),
        (["--nodes", "2", "--slurm", "x=1\n#SBATCH --wrap=y", "--", *TRAIN], "expected an sbatch option"),
        (["--nodes", "2", "--image", "a", "--mount", "here", "--", *TRAIN], "expected FROM:TO"),
        (["--nodes", "2", "--mount", "/a:/b", "--", *TRAIN], "--mount /a:/b without --image"),
        *(
            (["--nodes", "2", "--image", image, "--", *TRAIN], f"expected --image {image.replace('/', '#', 1)}:")
            for image in ("registry.example/group/image:1", "localhost/image", "host:5000/image")
        ),
        (["--nodes", "2"], "is missing"),
    ],
)
def test_what_would_fail_in_the_queue_is_refused_before_it(arguments: list[str], said: str, cli) -> None:
    assert said in cli("launch --gpus-per-node 4", *arguments, code=2)


def test_submitting_hands_the_script_to_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli, printed) -> None:
    play(tmp_path, sbatch=f"cat > {tmp_path}/got; echo Submitted batch job 7")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert cli("launch --nodes 2 --gpus-per-node 4 --submit --", *TRAIN) == "Submitted batch job 7\n"
    assert (tmp_path / "got").read_text() == printed()
    play(tmp_path, sbatch="echo sbatch: error: no partition >&2; exit 1")
    assert "no partition" in cli("launch --nodes 2 --gpus-per-node 4 --submit --", *TRAIN, code=2)


def play(folder: Path, **commands: str) -> None:
    for name, body in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("ends_with", "noticed", "retries", "again"),
    [
        pytest.param(0, False, 0, False, id="complete"),
        pytest.param(1, True, 0, True, id="noticed"),
        pytest.param(0, True, 0, False, id="noticed in its last step"),
        pytest.param(1, False, 0, False, id="failed"),
        pytest.param(1, False, 2, True, id="failed with a retry left"),
    ],
)
def test_the_script_goes_back_into_the_queue_only_where_it_should(
    ends_with: int, noticed: bool, retries: int, again: bool, tmp_path: Path, printed
) -> None:
    """srun stands for the step: like the real one it passes the notice on, and its command ends a moment later."""
    wait = "trap 'sleep 0.2; touch passed; exit $E' USR1; touch started; for i in $(seq 600); do sleep 0.1; done"
    play(
        tmp_path,
        scontrol='[ "$1" = requeue ] && touch requeued || echo node1',
        srun=f"E={ends_with}; {wait if noticed else 'exit $E'}",
        sleep='[ "$1" = 60 ] || exec /bin/sleep "$@"',
    )
    job = begin(tmp_path, printed("--retries", str(retries)))
    if noticed:
        appears(tmp_path / "started")
        job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=120) == ends_with
    assert (tmp_path / "passed").exists() == noticed
    assert (tmp_path / "requeued").exists() == again


def test_a_notice_before_the_run_starts_keeps_it_in_the_queue(tmp_path: Path, printed) -> None:
    play(
        tmp_path,
        scontrol='if [ "$1" = requeue ]; then touch requeued; else touch meeting; until [ -e go ]; do sleep 0.05; done; fi',
        srun="touch started",
        sleep='[ "$1" = 60 ] || exec /bin/sleep "$@"',
    )
    job = begin(tmp_path, printed())
    appears(tmp_path / "meeting")
    job.send_signal(signal.SIGUSR1)
    (tmp_path / "go").touch()
    assert job.wait(timeout=120) == 1
    assert (tmp_path / "requeued").exists()
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("command", "hear"), [(TRAIN, True), (["mine.py"], False)], ids=["train", "a script, whose handler is called once"]
)
def test_ranks_that_start_after_a_notice_hear_it(command: list[str], hear: bool, tmp_path: Path, printed) -> None:
    """srun stands for ranks that ignore the first notice, as while they import, and listen from then on."""
    (tmp_path / "mine.py").touch()
    first = "trap 'touch ignored' USR1; touch started; until [ -e ignored ]; do sleep 0.05; done"
    then = "trap 'n=$((n+1))' USR1; for i in $(seq 60); do sleep 0.05; done; echo $n > heard"
    play(
        tmp_path,
        scontrol="echo node1",
        srun=f"{first}; {then}; exit 1",
        # (60: until Slurm ends the script; 5: between two notices)
        sleep='case "$1" in 60) ;; 5) exec /bin/sleep 0.3;; *) exec /bin/sleep "$@";; esac',
    )
    job = begin(tmp_path, printed(command=command))
    appears(tmp_path / "started")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=120) == 1
    assert bool((tmp_path / "heard").read_text().strip()) == hear


def begin(folder: Path, text: str) -> subprocess.Popen[bytes]:
    """The script as Slurm starts it, with the commands that were played."""
    (folder / "job.sh").write_text(text, encoding="utf-8")
    known = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_RESTART_COUNT": "1"}  # fmt: skip
    return subprocess.Popen(["bash", "job.sh"], cwd=folder, env=known)


def appears(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert file.exists()


def test_time_limits_use_up_no_retries(tmp_path: Path, printed) -> None:
    play(tmp_path, scontrol='[ "$1" = requeue ] && touch requeued || echo node1', srun="exit 1", sleep="exit 0")
    (tmp_path / "job.sh").write_text(printed("--retries", "2"), encoding="utf-8")
    known = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    again = []
    # nine restarts after time limits have been; then it fails three times
    for restarts in ("9", "10", "11"):
        subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=known | {"SLURM_RESTART_COUNT": restarts}, check=False)
        again.append((tmp_path / "requeued").exists())
        (tmp_path / "requeued").unlink(missing_ok=True)
    assert again == [True, True, False]


def test_short_options_of_sbatch_stay_short(printed) -> None:
    text = printed("--slurm", "A=me", "--slurm=-p=long", "--slurm=-H", "--slurm=--qos=high")
    assert {"#SBATCH -A me", "#SBATCH -p long", "#SBATCH -H", "#SBATCH --qos=high"} <= set(text.splitlines())


@pytest.mark.parametrize(
    ("text", "seconds"),
    # man sbatch: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and days-hours:minutes:seconds
    [("5", 300), ("5:30", 330), ("1:02:03", 3723), ("2-3", 183600), ("1-0:1", 86460), ("1-0:0:1", 86401), ("-1", None), ("1:2:3:4", None), ("4h", None)],
)  # fmt: skip
def test_a_time_limit_is_read_as_sbatch_reads_it(text: str, seconds: int | None) -> None:
    assert limit_seconds(text) == seconds


def test_all_that_is_wrong_with_a_job_is_said_at_once(cli) -> None:
    wrong = ["--time", "x", "--notice", "0", "--name", "a b", "--slurm", "array=3", "--mount", "/a:/b"]
    assert len(cli("launch --nodes 0 --gpus-per-node 4", *wrong, "--", *TRAIN, code=2).splitlines()) == 7


def test_a_run_that_begins_with_weights_repeats_its_command(printed) -> None:
    (begin := Path.cwd() / "begin" / "step_00000000").mkdir(parents=True)
    (begin / "manifest.json").write_text('{"schema": 2, "files": {}}')
    text = printed(command=[*TRAIN, "checkpoint.pretrained_checkpoint=begin"])
    assert "checkpoint.pretrained_checkpoint=begin checkpoint.load=runs/a" in text


def test_a_rule_that_holds_on_every_machine_is_asked_before_the_queue(cli) -> None:
    wrong = ["optimizer.optimizer=sgd", "ddp.use_distributed_optimizer=true"]
    printed = cli("launch --nodes 2 --gpus-per-node 4 --", *TRAIN, *wrong, code=1, error=True)
    assert "distributed-optimizer-is-adam-only" in printed
    # what a GPU can do is no fault of a login node
    names = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
    sharded = [f"ddp.{name}=true" for name in names]
    cli("launch --nodes 2 --gpus-per-node 4 --", *TRAIN, "--recipe", "mxfp8", *sharded)
