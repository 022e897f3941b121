"""Processes that begin with torch and megatron-core imported: forks of one that imported them once, which is most of what a small world costs.

    python zygote.py

reads one request a line from stdin, {"argv": [script, argument, ...], "world": size or 0, "env": {...}, "cwd": folder, "out": file, "err": file},
answers each with {"status": ...} on a line of its own, and ends with its stdin. A world is what torchrun makes of one machine: RANK and its kin, a
free port, the others ended when one fails, status 1 then. `argv` may begin with "-m", module.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
import warnings
from typing import Any

ENDS = 30.0
"""Seconds that the ranks which are left have after SIGTERM, as under torchrun."""


def warm() -> None:
    """Imports what nearly every world imports; nothing here may start a thread."""
    import torch.distributed.fsdp
    import torch.optim

    import mpbridge.engines.parallel
    import mpbridge.models.gpt
    import mpbridge.train.loop  # noqa: F401

    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)  # imports torch._dynamo
    gc.collect()
    gc.freeze()


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ranked(size: int) -> list[dict[str, str]]:
    """The environments that torchrun gives its ranks; one without any for a world of 0."""
    if not size:
        return [{}]
    shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def become(request: dict[str, Any], more: dict[str, str]) -> int:
    """In the fork: runs the script as the main one; its exit status."""
    for number, name, flags in ((0, os.devnull, os.O_RDONLY), (1, request["out"], 0), (2, request["err"], 0)):
        handle = os.open(name, flags or (os.O_WRONLY | os.O_CREAT | os.O_APPEND), 0o600)
        os.dup2(handle, number)
        os.close(handle)
    os.environ.clear()
    os.environ.update(request["env"] | more)
    os.chdir(request["cwd"])
    warnings.simplefilter("ignore")
    argv = list(request["argv"])
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def fork(request: dict[str, Any], more: dict[str, str]) -> int:
    """Starts a process; its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        status = become(request, more)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def served(request: dict[str, Any]) -> int:
    """Runs a request to its end; what torchrun's or, of a world of 0, the script's exit status would be."""
    running = {fork(request, more) for more in ranked(request["world"])}
    status, killed = 0, 0.0
    while running:
        pid, raw = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(0.01)
            if killed and time.monotonic() > killed:
                for one in running:
                    os.kill(one, signal.SIGKILL)
            continue
        running.discard(pid)
        code = os.waitstatus_to_exitcode(raw)
        if code and not status:
            status = 1 if request["world"] else code
            killed = time.monotonic() + ENDS
            for one in running:
                os.kill(one, signal.SIGTERM)
    return status


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever an import prints
    warm()
    print(json.dumps({"threads": len(os.listdir("/proc/self/task"))}), file=answers)
    for line in sys.stdin:
        print(json.dumps({"status": served(json.loads(line))}), file=answers)


if __name__ == "__main__":
    main()
