"""The verbs that only think load no framework, and listing costs little."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tests.forked import ROOT
from tests.light import loaded_by

POSIX = ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog")
"""Modules that Python has on POSIX systems alone."""
PURE = [
    ["list"], ["show", "fp8_cs"], ["plan", "--config", "deepseek_v3_671b", "--recipe", "mxfp8", "--explain"],
    ["check", "--recipe", "mxfp8", "--target", "b200"], ["memory", "--config", "llama3_8b", "--target", "h100"],
    ["estimate", "--config", "llama3_70b", "--world-size", "64", "--target", "h100"],
    ["export", "fp8_cs", "--to", "megatron-lm"], ["import", "docs/stacks/examples/ds_config.json"],
    ["compare", "fp8_cs", "mxfp8"], ["train", "--help"],
]  # fmt: skip
"""One command of each verb that needs neither a framework nor a POSIX system."""


@pytest.mark.parametrize("verb", PURE, ids=lambda verb: verb[0])
def test_thinking_loads_no_framework_and_no_module_that_only_posix_has(verb):
    absent = f"sys.modules.update(dict.fromkeys({POSIX!r}))\nfrom mpbridge.cli.main import main\n"
    assert loaded_by(f"{absent}assert main({verb!r}) in (0, 1)") == []  # 1: the answer is no


def test_the_test_above_can_fail():
    assert "numpy" in loaded_by("import numpy")


REFUSED = {
    "a misspelled setting": (["train.train_itres=3"], 2),
    "a broken rule": (["optimizer.optimizer=sgd", "ddp.use_distributed_optimizer=true"], 1),
    "no such hardware": (["--recipe", "bf16_with_mxfp8_mixed"], 1),
}


@pytest.mark.parametrize(("arguments", "code"), REFUSED.values(), ids=REFUSED)
def test_a_refused_training_run_says_so_without_torch(arguments, code):
    # a machine with a GPU would run one of these
    start = "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\nfrom mpbridge.cli.main import main\n"
    assert loaded_by(f"{start}assert main(['train', *{arguments!r}]) == {code}") == []


def cpu_seconds(*arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, check=True, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("arguments", [("-c", "import mpbridge"), ("-m", "mpbridge", "list")], ids=["import", "list"])
def test_a_look_costs_at_most_150_milliseconds_of_cpu(arguments):
    # the best of three: other work on the machine costs cache, never the other way round
    # 0.15 s on an idle machine; a crowded one is as much slower for Python itself, which takes 0.025 s there
    bare = min(cpu_seconds("-c", "pass") for _ in range(3))
    assert min(cpu_seconds(*arguments) for _ in range(3)) <= max(0.15, 7 * bare)
