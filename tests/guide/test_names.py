"""Names that scripts, configurations and other packages use: they keep working wherever the code behind them moves."""

from __future__ import annotations

import graphlib
import importlib

import grimp
import pytest

from mpbridge.cli.main import ALIASES, verbs
from mpbridge.common import traits
from mpbridge.precision import registry

VERBS = {
    "audit", "calibrate", "check", "compare", "completion", "convert", "data", "diagnose", "diff", "disclose", "doctor", "estimate", "export", "import", "init", "launch",
    "layouts", "list", "memory", "on-cpu", "plan", "plot", "precision", "recommend", "rehearse", "report", "resume-check", "show", "simulate", "train", "tune", "verify", "words",
}  # fmt: skip
DOCUMENTED = {
    "mpbridge.compat.megatron_bridge": "bf16_mixed", "mpbridge.te_cpu.pytest_plugin": "pytest_addoption",
}  # fmt: skip
"""Modules whose paths keep working -> a name in each."""


def test_verbs_and_entry_point_groups_are_there() -> None:
    assert {*verbs(), *ALIASES} >= VERBS
    assert (traits.ENTRY_POINTS, registry.ENTRY_POINTS) == ("mpbridge.engines", "mpbridge.recipes")


@pytest.mark.parametrize("path", DOCUMENTED)
def test_a_documented_path_is_the_present_module(path: str) -> None:
    assert hasattr(importlib.import_module(path), DOCUMENTED[path])


def test_no_two_files_import_each_other_in_a_circle() -> None:
    """Imports for types alone count too; those of the package itself do not, since it loads its names when they are asked for."""
    graph = grimp.build_graph("mpbridge", exclude_type_checking_imports=False, cache_dir=None)
    files = {name: graph.find_modules_directly_imported_by(name) - {"mpbridge"} for name in graph.modules}
    assert len(files) > 300
    graphlib.TopologicalSorter(files).prepare()  # raises CycleError with the circle


def test_the_path_of_bridges_users_is_the_present_module() -> None:
    from mpbridge.compat import megatron_bridge
    from mpbridge.interop import megatron_bridge as present

    assert megatron_bridge is present is importlib.import_module("mpbridge.compat.megatron_bridge")
