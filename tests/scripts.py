"""Scripts of scripts/ as modules."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from tests.forked import ROOT


def loaded(name: str) -> Any:
    """scripts/<name>.py, loaded anew: a script has no package, and in its folder files have the names of packages that other tests look for."""
    path = ROOT / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[path.stem] = module = importlib.util.module_from_spec(
        spec
    )  # dataclasses ask for it, and so do scripts beside it
    spec.loader.exec_module(module)
    return module
