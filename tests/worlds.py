"""Worlds of several processes on this machine, everything that their ranks said shown when one of them fails."""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_zygotes: list[subprocess.Popen[str]] = []


class Ended(NamedTuple):
    """What a process, or a world of them, left."""

    returncode: int
    stdout: str
    stderr: str


def _zygote() -> subprocess.Popen[str]:
    """This test process's own, started when it is first asked for."""
    if not _zygotes or _zygotes[0].poll() is not None:
        _zygotes.clear()
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("zygote.py"))]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        # a session of its own: a test that kills its group does not reach it
        made = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip
        _zygotes.append(made)
        assert json.loads(_answer(made, 120.0)) == {"threads": 1}, "a process with threads cannot be forked"
        atexit.register(_end)
    return _zygotes[0]


def _end() -> None:
    for one in _zygotes:
        one.kill()
        one.wait()
    _zygotes.clear()


def _answer(zygote: subprocess.Popen[str], timeout: float) -> str:
    assert zygote.stdout is not None
    if not select.select([zygote.stdout], [], [], timeout)[0]:
        # its children with it: they are in groups of their own and end with their parent's session
        subprocess.run(["pkill", "-KILL", "-P", str(zygote.pid)], check=False)
        _end()
        raise subprocess.TimeoutExpired("a forked world", timeout)
    return zygote.stdout.readline()


def forked(
    argv: Sequence[str],
    *,
    world: int = 0,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    timeout: float = 280.0,
) -> Ended:
    """`python argv` in a fork of a process that has imported torch and megatron-core; in as many as `world` says, as torchrun would start them.

    For what tests the arithmetic of a world. What tests the start of processes itself starts them.
    """
    zygote = _zygote()
    assert zygote.stdin is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = {"argv": list(argv), "world": world, "env": dict(os.environ if env is None else env), "cwd": str(cwd), "out": str(out), "err": str(err)}  # fmt: skip
        zygote.stdin.write(json.dumps(request) + "\n")
        zygote.stdin.flush()
        try:
            status = json.loads(_answer(zygote, timeout))["status"]
        except subprocess.TimeoutExpired as error:
            error.stdout, error.stderr = (file.read_bytes() if file.exists() else b"" for file in (out, err))
            raise
        said = [file.read_text(errors="replace") if file.exists() else "" for file in (out, err)]
        return Ended(status, *said)


def start(size: int, script: str, *arguments: str, timeout: float = 280.0, expect: int = 0) -> str:
    """What `size` processes running `script` printed; the test fails where the exit status is not the expected one."""
    done = forked([script, *arguments], world=size, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=timeout)
    assert done.returncode == expect, done.stdout[-6000:] + done.stderr[-8000:]
    return done.stdout


def reported(size: int, script: str, out: Path, *arguments: str, timeout: float = 280.0) -> Any:
    """What rank 0 of such a world left as JSON in `out`, the script's first argument."""
    start(size, script, str(out), *arguments, timeout=timeout)
    return json.loads(out.read_text())


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of one, and none of megatron-core's parallel state behind it: for loops that set that up themselves."""
    from megatron.core import parallel_state

    from mpbridge.engines.parallel import start_process_group, stop_process_group

    mine = start_process_group(False)
    yield
    parallel_state.destroy_model_parallel()
    if mine:
        stop_process_group()


COUNTED = """
calls = []
def counted(name):
    real = getattr(dist, name)
    def call(*args, **kwargs):
        out = args[0] if isinstance(args[0], list) else [args[0]]
        calls.append((name, sum(one.numel() * one.element_size() for one in out if isinstance(one, torch.Tensor))))
        return real(*args, **kwargs)
    setattr(dist, name, call)
for name in ("all_gather", "all_reduce", "broadcast", "all_gather_object", "broadcast_object_list", "all_gather_into_tensor"):
    counted(name)
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=int(sys.argv[1]))
"""
"""Of a script that has imported dist, sys, torch and FakeStore: a fake world of as many ranks as it is told; `calls`: (collective, bytes that rank 0 gets)."""
