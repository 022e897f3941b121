"""The main module of a process spawned by a played script: `multiprocessing` runs it and finds the script's names in it."""

import atexit
import json
import os
import runpy
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mpbridge.common.upstream import replaced
from mpbridge.te_cpu.context import transformer_engine_on_cpu
from mpbridge.te_cpu.foreign import VARIABLE, foreign_code

_STAY = ExitStack()
atexit.register(_STAY.close)  # later, at the interpreter's end, modules are gone


def _begin() -> dict[str, Any]:
    """In a child: plays until the process ends, and returns the names of the parent's main module, run as multiprocessing runs it."""
    wanted = json.loads(os.environ[VARIABLE])
    _STAY.enter_context(transformer_engine_on_cpu(wanted["machine"], te=wanted["te"]))
    # the script decides whether its children are ranks of one world, so they keep its port
    _STAY.enter_context(foreign_code(own_port=False))
    name, path = wanted.get("init_main_from_name"), wanted.get("init_main_from_path")
    with _work_refused(path or name):
        if path:
            return runpy.run_path(path, run_name="__mp_main__")
        if name and name != "__main__" and not name.endswith(".__main__"):
            return runpy.run_module(name, run_name="__mp_main__", alter_sys=True)
    return {}


def _work_refused(script: str | None) -> AbstractContextManager[None]:
    """In the block, process groups are refused: a script that makes one while it is only imported would wait for its own parent."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f'{script} begins its work again in a process that it has started, which must only import it: put what it runs below `if __name__ == "__main__":`'
        )

    return replaced(*((owner, "init_process_group", refuse) for owner in (dist, distributed_c10d)))


globals().update({name: value for name, value in _begin().items() if not name.startswith("__")})
