"""The package's front door, as a program, an editor and mypy see it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import mpbridge

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    "ConfigContainer", "MixedPrecisionConfig", "MpbridgeError", "Plan", "PrecisionPolicy", "Receipt", "Run", "__version__",
    "apply", "build", "emulate", "get_mixed_precision_config", "plan", "pretrain", "recipes", "register", "resolve",
    "transformer_engine_on_cpu", "tune_module", "witness", "wrap",
}  # fmt: skip


def test_the_public_names_are_those_promised() -> None:
    assert set(mpbridge.__all__) == NAMES
    assert set(dir(mpbridge)) == NAMES
    for name in NAMES - {"__version__", "recipes"}:
        # a witness is an object of the class that the front door names as the function it once was
        assert getattr(mpbridge, name).__name__ == {"witness": "Witness"}.get(name, name)
    assert "bf16_mixed" in mpbridge.recipes


def test_what_the_pages_import_is_public() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    lines = re.findall(r"^from mpbridge import (.+)$", text, re.M)
    imported = {name.strip() for line in lines for name in line.split(",")}
    assert {"ConfigContainer", "pretrain", "apply"} <= imported <= NAMES


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'aply'"):
        mpbridge.aply  # noqa: B018


SNIPPET = """
import mpbridge
from mpbridge import ConfigContainer, MpbridgeError, Plan, Receipt, Run, apply, pretrain

config = ConfigContainer(mixed_precision="bf16_mixed", model={"num_layers": 4}, optimizer={"lr": 1e-3})
config.train.train_iters = 10
config.optimizer = {"lr": 1e-4}
run: Run = config.resolved()
planned: Plan = run.plan
receipt: Receipt = apply(planned)
loss: int = pretrain(run)  # error: Incompatible types
error: int = MpbridgeError()  # error: Incompatible types
mpbridge.aply  # error: Module has no attribute "aply"
config.train.train_iter = 10  # error: "TrainSection" has no attribute "train_iter"
config.optimiser  # error: "ConfigContainer" has no attribute "optimiser"
config.train.train_iters = "ten"  # error: Incompatible types
ConfigContainer(model={"num_layer": 4})  # error: Argument "model"
ConfigContainer(modell={})  # error: Unexpected keyword argument "modell"
"""

WITHOUT = """
[[tool.mypy.overrides]]
module = ["torch.*", "numpy.*", "rich.*"]
follow_imports = "skip"
"""
"""None of these types is in the snippet, and most of a start without a cache is reading torch."""


def test_mypy_knows_every_name_and_refuses_unknown_ones(tmp_path: Path) -> None:
    snippet, settings = tmp_path / "snippet.py", tmp_path / "pyproject.toml"
    snippet.write_text(SNIPPET, encoding="utf-8")
    settings.write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8") + WITHOUT, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings)]  # which says strict
    done = subprocess.run(
        [*command, "--cache-dir", str(ROOT / ".mypy_cache" / "front_door"), str(snippet)],
        cwd=ROOT, capture_output=True, text=True, timeout=840, check=False,
    )  # fmt: skip
    found = dict(re.findall(r"snippet\.py:(\d+): error: (.*)", done.stdout))
    parts = [line.partition("# error: ") for line in SNIPPET.splitlines()]
    wanted = {str(number): text for number, (_, mark, text) in enumerate(parts, start=1) if mark}
    assert found.keys() == wanted.keys(), done.stdout + done.stderr
    for number, text in wanted.items():
        assert found[number].startswith(text)
