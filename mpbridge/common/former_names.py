"""Modules that the documentation named under another path before the wings: the old path still imports the same module.

The finder is installed by `import mpbridge`, imports nothing by itself, and hands out the module that is loaded under its present name, so that
classes and state exist once. New code uses the present names.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

FORMER = {
    "mpbridge.audit": "mpbridge.observe.audit",
    "mpbridge.compat.megatron_bridge": "mpbridge.interop.megatron_bridge",
    "mpbridge.config": "mpbridge.settings",
    "mpbridge.devices": "mpbridge.backend.devices",
    "mpbridge.diagnose": "mpbridge.observe.diagnose",
    "mpbridge.emulation": "mpbridge.numerics",
    "mpbridge.engines": "mpbridge.backend.engines",
    "mpbridge.errors": "mpbridge.common.errors",
    "mpbridge.megatron": "mpbridge.backend.megatron",
    "mpbridge.stacks": "mpbridge.interop.stacks",
    "mpbridge.sync": "mpbridge.precision.sync",
    "mpbridge.train": "mpbridge.training",
    "mpbridge.traits": "mpbridge.common.traits",
    "mpbridge.tune": "mpbridge.training.tune",
    "mpbridge.witnessing": "mpbridge.observe.witnessing",
}
"""Former path -> present path; modules below a package follow it."""


def present(name: str) -> str | None:
    """The present path of a module under a former path; None if `name` is none."""
    for old, new in FORMER.items():
        if name == old or name.startswith(old + "."):
            return new + name[len(old) :]
    return None


class Finder(importlib.abc.MetaPathFinder):
    """Finds modules under their former paths."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of the present module under the former name; None for every other name."""
        new = present(name)
        return None if new is None else importlib.machinery.ModuleSpec(name, _Loader(new))


class _Loader(importlib.abc.Loader):
    def __init__(self, new: str) -> None:
        self.new = new

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.new)
        self.own = module.__spec__  # the import system overwrites it with the former name's
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.own


def install() -> None:
    """Inserts the finder before the others, once."""
    if not any(
        type(finder).__name__ == Finder.__name__ and type(finder).__module__ == __name__ for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, Finder())
