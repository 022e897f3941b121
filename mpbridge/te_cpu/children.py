"""Processes that a played script starts by spawn: they import its main module again, on the machine that the script plays.

Every process sees a real GPU; a played machine exists only in its own process, so a child's import of Transformer Engine would fail for lack of
the compiled library. Therefore a child starts here, plays what its parent plays, and continues with the parent's main module.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import spawn
from typing import Any

VARIABLE = "MPBRIDGE_CHILD"
"""What a child process plays: the machine, the release, and the parent's main module by name or by path (JSON)."""


@contextmanager
def children_play(machine: str, te: str) -> Iterator[None]:
    """In the block, processes started by spawn or forkserver also play `machine` with release `te`."""
    original, before = spawn.get_preparation_data, os.environ.get(VARIABLE)

    def get_preparation_data(name: str) -> dict[str, Any]:
        found = original(name)
        main = {key: found.pop(key) for key in ("init_main_from_name", "init_main_from_path") if key in found}
        os.environ[VARIABLE] = json.dumps({"machine": machine, "te": te, **main})
        return found | {"init_main_from_name": "mpbridge.te_cpu.child"}

    spawn.get_preparation_data = get_preparation_data
    try:
        yield
    finally:
        spawn.get_preparation_data = original
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before
