"""The main module of a process spawned by a played script: `multiprocessing` runs it and finds the script's names in it."""

import json
import os
import runpy
from contextlib import ExitStack
from typing import Any

from mpbridge.te_cpu.children import VARIABLE
from mpbridge.te_cpu.context import transformer_engine_on_cpu
from mpbridge.te_cpu.foreign import foreign_code

_STAY = ExitStack()


def _begin() -> dict[str, Any]:
    """In a child: plays until the process ends, and returns the names of the parent's main module, run as multiprocessing runs it."""
    wanted = json.loads(os.environ[VARIABLE])
    _STAY.enter_context(transformer_engine_on_cpu(wanted["machine"], te=wanted["te"]))
    # the script decides whether its children are ranks of one world, so they keep its port
    _STAY.enter_context(foreign_code(own_port=False))
    name, path = wanted.get("init_main_from_name"), wanted.get("init_main_from_path")
    if path:
        return runpy.run_path(path, run_name="__mp_main__")
    if name and name != "__main__" and not name.endswith(".__main__"):
        return runpy.run_module(name, run_name="__mp_main__", alter_sys=True)
    return {}


globals().update({name: value for name, value in _begin().items() if not name.startswith("__")})
