"""Configurations and recipes that come with mpbridge, by name: `configs/` beside a checkout's package, inside of an installed one."""

from __future__ import annotations

from pathlib import Path

from mpbridge.errors import UnknownName

YAML = (".yaml", ".yml")
_PACKAGE = Path(__file__).resolve().parent


def folder() -> Path:
    """Where they are."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


def configurations() -> dict[str, Path]:
    """Name -> file; a folder `configs` of the user's, in the working directory, goes before ours."""
    return {found.stem: found for place in (folder(), Path("configs")) for found in sorted(place.glob("*.yaml"))}


def configuration(wanted: str) -> Path:
    """The file that `wanted` means: a path, there or not, or a name, 'gpt_tiny' or 'configs/gpt_tiny.yaml'. Raises UnknownName."""
    path = Path(wanted)
    ours = path.suffix in YAML and path.parent in (Path("."), Path("configs"))
    if path.suffix in YAML and (path.exists() or not ours):
        return path
    known = configurations()
    key = path.stem if ours else wanted
    if key in known:
        return known[key]
    if path.exists() and not path.is_dir():
        return path
    raise UnknownName("configuration", wanted, known)


def recipe_files() -> dict[str, Path]:
    """Name -> file of each recipe that is YAML."""
    return {found.stem: found for found in sorted((folder() / "recipes").glob("*.yaml"))}


def recipe_file(wanted: str) -> Path | None:
    """The file of the recipe called `wanted`, 'bf16_grads' or 'configs/recipes/bf16_grads.yaml' away from a checkout; None: there is none."""
    path = Path(wanted)
    ours = path.suffix in YAML and path.parent == Path("configs/recipes") and not path.exists()
    return recipe_files().get(path.stem if ours else wanted.strip().lower().replace("-", "_"))


def label(path: Path) -> str:
    """How a file is named to people: one of ours by its name, wherever it is installed."""
    return f"mpbridge's {path.stem}" if path.is_absolute() and path.is_relative_to(folder()) else str(path)
