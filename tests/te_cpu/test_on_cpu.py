"""`mpbridge on-cpu` runs a script that knows only CUDA, in processes of its own: also those that the script spawns."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.te_cpu.wheels import OLDEST, ROOT, environment, release_or_skip

SCRIPT = '''
import multiprocessing, sys
import torch
import transformer_engine.pytorch as te

class Box:
    """Pickled by name of the main module."""
    def __init__(self, value):
        self.value = value

def ask(box, answers):
    answers["name"] = torch.cuda.get_device_name()
    answers["weight"] = str(te.Linear(16, 16, device="cuda").weight.device)
    answers["value"] = box.value

if __name__ == "__main__":
    assert sys.argv[1:] == ["--flag", "x"], sys.argv
    context = multiprocessing.get_context(sys.argv[0].split("-")[-1].removesuffix(".py"))
    with context.Manager() as manager:
        answers = manager.dict()
        child = context.Process(target=ask, args=(Box(7), answers))
        child.start()
        child.join()
        assert child.exitcode == 0
        print(dict(answers))
'''


def on_cpu(script, *arguments: str) -> subprocess.CompletedProcess[str]:
    te = release_or_skip(OLDEST)
    command = [sys.executable, "-W", "ignore", "-m", "mpbridge", "on-cpu", "--target", "b200", "--te", te, str(script)]
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [*command, *arguments],
        cwd=script.parent,
        env=environment() | path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_processes_that_a_script_spawns_play_the_same_machine(tmp_path) -> None:
    script = tmp_path / "script-spawn.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = on_cpu(script, "--flag", "x")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("{'name': 'B200', 'weight': 'cpu', 'value': 7}")


def test_check_says_that_the_target_is_played() -> None:
    te = release_or_skip(OLDEST)
    command = [sys.executable, "-m", "mpbridge", "check", "--recipe", "bf16_with_fp8_delayed_scaling_mixed"]
    command.append("ddp.use_distributed_optimizer=true")
    for more, played in (["--emulate", "te", "--te", te], True), ([], False):
        done = subprocess.run(
            [*command, *more, "--target", "h100"],
            cwd=ROOT,
            env=environment() | {"COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said = "here   played by Transformer Engine 2.11.0's own Python on the CPU"
        assert (said in done.stdout) is played
