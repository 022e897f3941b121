"""The distribution's name: `mpbridge` on the package index is another project's program, so no text may tell anybody to install that."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mpbridge
from mpbridge.common import shipped

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("mpbridge/**/*.py", "docs/**/*.md", "docs/*.ipynb", "scripts/**/*.*", "tests/**/*.py", "*.md", "pyproject.toml", "configs/**/*.yaml")  # fmt: skip
OTHERS = re.compile(
    r"pip\d? +install(?: +-[\w-]+)* +['\"]?mpbridge(?:\[[\w,-]*\])?(?![\w-])|(?<![\w/-])mpbridge\[[a-z][a-z,-]*\]"
)
"""An installation of `mpbridge` by name, and an extra of that name."""


def test_pyproject_and_its_extras_have_the_name_of_the_constant() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == shipped.DISTRIBUTION != "mpbridge"
    assert project["version"] == shipped.VERSION == mpbridge.__version__
    extras = project["optional-dependencies"]
    own = [need for needs in extras.values() for need in needs if need.startswith("mpbridge")]
    assert own
    for need in own:
        name, _, parts = need.rstrip("]").partition("[")
        assert name == shipped.DISTRIBUTION
        assert set(parts.split(",")) <= set(extras)


def test_no_text_tells_to_install_another_projects_program() -> None:
    found = []
    for path in {path for pattern in TEXTS for path in ROOT.glob(pattern)} - {Path(__file__), ROOT / "CHANGELOG.md"}:
        if path.is_file() and path.suffix in (".py", ".md", ".ipynb", ".sh", ".toml", ".yaml", ".txt"):
            for match in OTHERS.finditer(path.read_text(encoding="utf-8")):
                found.append(f"{path.relative_to(ROOT)}: {match[0]}")
    assert found == []
    assert OTHERS.search("pip install 'mpbridge[hf]'")
    assert OTHERS.search("install mpbridge[te], or")
    assert not OTHERS.search(shipped.install("hf"))


def test_every_extra_that_a_text_names_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    hint = re.compile(r"pip install -e '\.\[([\w,-]+)\]'|\binstall\([\"']([\w-]+)[\"']\)")
    for pattern in TEXTS:
        for path in ROOT.glob(pattern):
            if path.is_file() and path.suffix in (".py", ".md"):
                for match in hint.finditer(path.read_text(encoding="utf-8")):
                    named = (match[1] or match[2]).split(",")
                    assert set(named) <= {*extras, "EXTRA"}, f"{path}: {match[0]}"


def test_every_package_that_the_scripts_install_has_its_release_in_the_constraints() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = (ROOT / "scripts/constraints.txt").read_text(encoding="utf-8").splitlines()
    fixed = {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines if line[0] != "#"}
    wanted = [
        Requirement(need) for need in project["dependencies"] + extras["dev"] + extras["plot"] + extras["te-needs"]
    ]
    for need in wanted:
        # build tools follow torch, which bounds setuptools in some releases
        if need.name not in (shipped.DISTRIBUTION, "setuptools"):
            assert need.specifier.contains(fixed[canonicalize_name(need.name)]), need


def test_until_it_is_published_the_hint_is_a_checkout(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    assert shipped.install("hf") == "pip install -e '.[hf]' in a checkout of mpbridge"
    monkeypatch.setattr(shipped, "PUBLISHED", True)
    assert shipped.install("hf") == f"pip install '{shipped.DISTRIBUTION}[hf]'"
