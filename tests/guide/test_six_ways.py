"""The six changes of CONTRIBUTING.md, each made in a copy of the package by a small patch: it takes as few product files as the guide says, and it works."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = Path(__file__).parent / "six_ways"
SCHEMA = "mpbridge/precision/megatron_spec/schema"
PATCH = shutil.which("patch")

PROBES = {
    "dtype_field": """
from mpbridge import MixedPrecisionConfig, plan, resolve
from mpbridge.cli.main import main
from mpbridge.common.errors import Contradiction
from mpbridge.common.facts import OptimizerFacts
from mpbridge.common.traits import traits
from mpbridge.planning.memory.keeps import keeps
from mpbridge.precision.config import plain_states

config = MixedPrecisionConfig(bf16=True, ema_dtype="fp16")
policy = resolve(config)
assert policy.ema.short == "fp16" and policy != resolve(MixedPrecisionConfig(bf16=True))
assert policy.fingerprint() != resolve(MixedPrecisionConfig(bf16=True)).fingerprint()
assert {w.name: w.after.short for w in plan(policy, optimizer={}).writes if w.name == "optimizer.ema_dtype"} == {"optimizer.ema_dtype": "fp16"}
assert keeps(policy, traits("mcore"), OptimizerFacts(distributed=True))["ema"].dtype.short == "fp16"
assert plain_states()["ema_dtype"] is None
try:
    resolve(MixedPrecisionConfig(bf16=True, ema_dtype="fp64"))
except Contradiction as error:
    assert "ema_dtype=fp64 is not one of fp32, fp16, bf16, uint8" in str(error), error
else:
    raise AssertionError("an illegal dtype was accepted")
open("r.yaml", "w").write("extends: bf16_mixed\\nema_dtype: fp16\\n")
assert main(["show", "r.yaml"]) == 0
""",
    "written_field": """
from mpbridge import plan, resolve, get_mixed_precision_config
(write,) = [w for w in plan(resolve(get_mixed_precision_config("full_bf16")), optimizer={"norm_dtype": "fp32"}).writes if w.name == "optimizer.norm_dtype"]
assert write.after.short == "bf16" and write.conflict
""",
    "rule": """
from mpbridge.cli.main import main
assert main(["check", "--config", "gpt_tiny", "--recipe", "bf16_mixed", "model.num_layers=13"]) == 0
""",
    "engine": """
from mpbridge.cli.main import main
assert main(["train", "--config", "gpt_tiny", "--recipe", "bf16_mixed", "--engine", "sixth", "train.train_iters=2", "train.global_batch_size=1",
             "model.num_layers=1", "train.eval_interval=null", "logger.log_dir=null"]) == 0
assert main(["check", "--config", "gpt_tiny", "--recipe", "fp32", "--engine", "sixth"]) == 1
""",
}  # fmt: skip
SAYS = {
    "dtype_field": "averaged weights",
    "rule": "six-ways",
    "engine": "live audit, sixth, 1 process(es): as promised",
}
"""What the probe prints."""
UPSTREAM = {"dtype_field": "ema_dtype", "written_field": "norm_dtype"}
"""A field that megatron-core's schema is given first: the change begins when a release has it."""
SUITES = {
    "dtype_field": ["tests/precision/test_fields.py", "tests/precision/sync/test_fields.py"],
    "written_field": ["tests/precision/sync/test_fields.py"],
}


def allowed(way: str) -> int:
    """The number of product files in CONTRIBUTING.md's guide to that change: '(N product files)' behind its title."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    titles = dict(re.findall(r"^### (.*?) \((\d+) product files?[^)]*\)$", text, re.MULTILINE))
    found = {
        "dtype_field": "A dtype field of a recipe",
        "written_field": "A field that the recipe writes",
        "rule": "A new rule",
        "engine": "A new engine",
    }
    return int(titles[found[way]])


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("mpbridge", "configs", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.skipif(PATCH is None, reason="needs the program patch")
@pytest.mark.parametrize("way", PROBES)
def test_a_change_takes_no_more_files_than_its_guide_says(way: str, copy: Path) -> None:
    patch = PATCHES / f"{way}.patch"
    files = set(re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(encoding="utf-8"), re.MULTILINE))
    assert all(name.startswith("mpbridge/") for name in files)
    assert len(files) <= allowed(way), sorted(files)
    for schema in (copy / SCHEMA).glob("*.json") if way in UPSTREAM else ():
        data = json.loads(schema.read_text(encoding="utf-8"))
        data["OptimizerConfig"][UPSTREAM[way]] = data["OptimizerConfig"]["main_params_dtype"]
        schema.write_text(json.dumps(data), encoding="utf-8")
    done = subprocess.run(["patch", "-p1", "-i", str(patch)], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    probe = [sys.executable, "-W", "ignore", "-c", f"import sys; sys.path.insert(0, {str(copy)!r})\n{PROBES[way]}"]
    ran = subprocess.run(probe, cwd=copy, capture_output=True, text=True, check=False, timeout=240)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert SAYS.get(way, "") in ran.stdout
    if way in SUITES:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-n0",
            "-p",
            "no:cacheprovider",
            "-k",
            "not megatron",
            *SUITES[way],
        ]
        suite = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False, timeout=240)
        assert suite.returncode == 0, suite.stdout[-4000:]
