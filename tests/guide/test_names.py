"""Names that scripts, configurations and other packages use: they keep working wherever the code behind them moves."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import mpbridge
from mpbridge.cli.main import verbs
from mpbridge.common import traits
from mpbridge.common.former_names import FORMER, present
from mpbridge.precision import registry

PUBLIC = {
    "ConfigContainer", "MixedPrecisionConfig", "MpbridgeError", "Plan", "PrecisionPolicy", "Receipt", "Run", "__version__", "apply", "build", "emulate",
    "get_mixed_precision_config", "plan", "pretrain", "recipes", "register", "resolve", "transformer_engine_on_cpu", "tune_module", "witness", "wrap",
}  # fmt: skip
VERBS = {
    "audit", "calibrate", "check", "compare", "completion", "convert", "data", "diagnose", "diff", "disclose", "doctor", "estimate", "export", "import", "init", "launch",
    "layouts", "list", "memory", "on-cpu", "plan", "plot", "precision", "recommend", "rehearse", "report", "resume-check", "show", "simulate", "train", "tune", "verify", "words",
}  # fmt: skip
DOCUMENTED = {
    "mpbridge.audit": "AuditHook", "mpbridge.compat.megatron_bridge": "bf16_mixed", "mpbridge.config.container": "ConfigContainer",
    "mpbridge.devices": "device_layer", "mpbridge.diagnose.diagnosis": "diagnose", "mpbridge.diagnose.page": "diagnosis_page",
    "mpbridge.engines.contract": "Engine", "mpbridge.engines.optimizers": "CpuFusedAdam", "mpbridge.errors": "MpbridgeError",
    "mpbridge.te_cpu.pytest_plugin": "pytest_addoption", "mpbridge.traits": "EngineTraits", "mpbridge.witnessing.callbacks": "FabricWitness",
}  # fmt: skip
"""Modules that the documentation of 0.1 named -> a name in each."""


def test_public_names_and_verbs_and_entry_point_groups_are_there() -> None:
    assert set(mpbridge.__all__) >= PUBLIC
    assert all(getattr(mpbridge, name) is not None for name in PUBLIC)
    assert set(verbs()) >= VERBS
    assert (traits.ENTRY_POINTS, registry.ENTRY_POINTS) == ("mpbridge.engines", "mpbridge.recipes")


@pytest.mark.parametrize("path", DOCUMENTED)
def test_a_documented_path_is_the_present_module(path: str) -> None:
    former = importlib.import_module(path)
    assert hasattr(former, DOCUMENTED[path])
    new = present(path)
    assert former is importlib.import_module(new or path)
    assert former.__spec__ is not None
    assert former.__spec__.name == former.__name__ == (new or path)  # not the former one: pickles and reloads name it


def test_every_former_path_leads_somewhere_and_none_is_taken() -> None:
    assert all(importlib.util.find_spec(new) is not None for new in FORMER.values())
    code = f"import mpbridge, sys, pathlib; home = pathlib.Path(mpbridge.__file__).parent; sys.exit(any((home / n.partition('.')[2].replace('.', '/')).with_suffix('.py').exists() for n in {list(FORMER)}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
