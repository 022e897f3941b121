"""What the checkout holds at its top: the rooms that CONTRIBUTING.md describes, and nothing that a tool or a trial left behind."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import LONGEST

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = {".ci", "configs", "docs", "mpbridge", "scripts", "tests"}
FILES = {".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "README.md"}
FILES |= {"mkdocs.yml", "pyproject.toml", "setup.py"}


def test_files_that_a_suite_begins_with_are_there() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []


def test_nothing_else_is_committed_at_the_top() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a checkout of it")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    top = {name.split("/")[0] for name in listed.stdout.split("\0") if name}
    assert top - FOLDERS - FILES == set()
