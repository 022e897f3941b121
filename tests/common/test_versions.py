"""Versions and entry points of installed packages are those that importlib.metadata finds."""

from __future__ import annotations

import importlib.metadata
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from mpbridge.common import versions


def test_every_installed_package_has_the_version_that_importlib_finds() -> None:
    names = {str(one.metadata["Name"]) for one in importlib.metadata.distributions()}
    assert len(names) > 20
    assert {name: versions.version(name) for name in names} == {name: importlib.metadata.version(name) for name in names}  # fmt: skip
    assert versions.version("no-such-package") is None


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of the import path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def package(place: Path, folder: str, version: str = "1.5") -> Path:
    info = place / folder
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: some-Package\nVersion: {version}\n\nVersion: 9\n")
    return info


@pytest.mark.parametrize("folder", ["some_package-1.5.dist-info", "Some.Package-1.5.dist-info", "some_package.dist-info"])  # fmt: skip
@pytest.mark.parametrize("asked", ["some-package", "Some_Package", "some.package"])
def test_names_are_compared_as_importlib_does(place: Path, folder: str, asked: str) -> None:
    package(place, folder)
    assert versions.version(asked) == importlib.metadata.version(asked) == "1.5"


def test_older_metadata_and_archives_are_left_to_importlib(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = place / "older_one-2.0.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 1.0\nName: older-one\nVersion: 2.0\n")
    assert versions.version("older-one") == "2.0"
    with zipfile.ZipFile(place / "packed.zip", "w") as archive:
        archive.writestr("packed_one-3.0.dist-info/METADATA", "Name: packed-one\nVersion: 3.0\n")
    assert versions.version("packed-one") is None
    monkeypatch.syspath_prepend(str(place / "packed.zip"))
    assert versions.version("packed-one") == "3.0"


def test_a_finder_of_somebody_else_is_asked(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Transformer Engine's loader on the CPU answers for the package that it plays."""
    info = package(place.parent, f"{place.name}-other-1.5.dist-info", "7.0")

    class Finder:
        @staticmethod
        def find_spec(*words: Any) -> None:
            return None

        @staticmethod
        def find_distributions(context: importlib.metadata.DistributionFinder.Context) -> Any:
            return [importlib.metadata.PathDistribution(info)] if context.name == "some-package" else []

    assert versions.version("some-package") is None
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    assert versions.version("some-package") == "7.0"


def test_entry_points_are_found_where_a_package_declares_them(place: Path) -> None:
    assert versions.entry_points("somebodys.group") == ()
    info = package(place, "some_package-1.5.dist-info")
    (info / "entry_points.txt").write_text("[somebodys.group]\nmine = some_module:value\n")
    (point,) = versions.entry_points("somebodys.group")
    assert (point.name, point.value) == ("mine", "some_module:value")
    assert {one.name for one in versions.entry_points("console_scripts")} >= {"mpbridge"}
