"""The changes of CONTRIBUTING.md take as many product files as it says: each is made in a copy of the package, from a patch, and works.

`six_ways/WAY.patch` is the change, `six_ways/WAY.py` what then holds (it runs with the copy on PYTHONPATH). A patch that no longer applies is made again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).with_name("six_ways")
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
WAYS = {
    "rule": "A new rule", "dtype_field": "A dtype field of a recipe",
    "written_field": "A field that the recipe writes, such as `grad_reduce_in_fp32`", "scaling": "A new scaling",
    "engine": "A new engine", "release": "Another version of megatron-core", "optimizer": "An optimizer",
    "layer": "A kind of layer",
}  # fmt: skip
"""Patch -> the heading of its guide."""
SCHEMA = "mpbridge/precision/megatron_spec/schema/{}.json"
ROWS = ("dtype_field", "written_field", "release")
SUITE = ("tests/precision/test_fields.py", "tests/precision/sync/test_fields.py")
"""The parts of the suite that hold for a new row as they stand."""
COPIED = shutil.ignore_patterns("__pycache__", "*.so")


def section(heading: str) -> str:
    """The guide below that heading."""
    return GUIDE.split(f"### {heading}\n")[1].split("\n### ")[0].split("\n## ")[0]


def touched(patch: str) -> list[str]:
    """The files that a patch changes or makes."""
    return re.findall(r"^\+\+\+ (\S+)", patch, re.MULTILINE)


def run(argv: list[str], where: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "GIT_"))}
    environment |= {
        "PYTHONPATH": str(where),
        "PYTHONDONTWRITEBYTECODE": "1",
        "GIT_CEILING_DIRECTORIES": str(where.parent),
    }
    done = subprocess.run(argv, cwd=where, env=environment, capture_output=True, text=True, check=False, timeout=480)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("way", "more"), [*((way, ()) for way in WAYS), pytest.param("optimizer", ("train",), marks=pytest.mark.slow)]
)
def test_a_change_takes_as_many_files_as_its_guide_says(way: str, more: tuple[str, ...], tmp_path: Path) -> None:
    guide, patch = section(WAYS[way]), (HERE / f"{way}.patch").read_text(encoding="utf-8")
    said = re.search(r"^Product files: (\d+)\.", guide, re.MULTILINE)
    assert said is not None, guide
    files = touched(patch) + [SCHEMA.format("0.21.0")] * (way == "release")
    assert len(set(files)) == int(said[1]), files
    assert all(file.startswith("mpbridge/") for file in files)
    assert not [file for file in files if not named(file, guide)], "files that the guide does not name"

    change(tmp_path, way)
    assert run([sys.executable, str(HERE / f"{way}.py"), *more], tmp_path).strip() == str(tmp_path / "mpbridge")


def test_the_suite_holds_for_new_rows_as_it_stands(tmp_path: Path) -> None:
    change(tmp_path, *ROWS)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=COPIED)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *SUITE], tmp_path)


def change(where: Path, *ways: str) -> None:
    """Makes these changes in a copy of the package."""
    shutil.copytree(ROOT / "mpbridge", where / "mpbridge", ignore=COPIED)
    for way in ways:
        run(["git", "apply", "-p0", str(HERE / f"{way}.patch")], where)
        if way == "release":
            described(where)


def described(where: Path) -> None:
    """The schema that make_schema.py would write of the new release: the last one's with two fields more."""
    schema = json.loads((where / SCHEMA.format("0.20.0")).read_text(encoding="utf-8"))
    schema["megatron_core"] = "0.21.0"
    for name in ("fp8_embedding", "fp32_rotary"):
        schema["TransformerConfig"][name] = {"types": ["bool"], "default": False}
    (where / SCHEMA.format("0.21.0")).write_text(json.dumps(schema), encoding="utf-8")


def named(file: str, guide: str) -> bool:
    """Whether the guide names the file, where NAME stands for any name and a folder for what is in it."""
    for path in re.findall(r"`(mpbridge/[\w./]+)`", guide):
        pattern = re.escape(path).replace("NAME", r"\w+") + (".+" if path.endswith("/") else "")
        if re.fullmatch(pattern, file):
            return True
    return False


def test_a_file_too_many_is_found() -> None:
    assert touched("--- mpbridge/a.py\n+++ mpbridge/a.py\n@@\n+x\n--- /dev/null\n+++ mpbridge/b.py\n") == [
        "mpbridge/a.py",
        "mpbridge/b.py",
    ]
    assert named("mpbridge/backend/engines/swap_traits.py", "`mpbridge/backend/engines/NAME_traits.py`")
    assert not named("mpbridge/backend/engines/base.py", "`mpbridge/backend/engines/contract.py`")
