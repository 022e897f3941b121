"""What is shipped: configurations and recipes by name (`configs/` is next to the package in a checkout, inside it when installed), and how to install it."""

from __future__ import annotations

from pathlib import Path

from mpbridge.common.errors import BadValue, UnknownName

YAML = (".yaml", ".yml")
_PACKAGE = Path(__file__).resolve().parent.parent


def folder() -> Path:
    """The folder that contains them."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


def configurations() -> dict[str, Path]:
    """Name -> file; a `configs` folder of the user's in the working directory takes precedence over the shipped one."""
    return {found.stem: found for place in (folder(), Path("configs")) for found in sorted(place.glob("*.yaml"))}


def configuration(wanted: str) -> Path:
    """The file that `wanted` refers to: a path, existing or not, or a name such as 'gpt_tiny' or 'configs/gpt_tiny.yaml'. Raises UnknownName, and BadValue for a folder."""
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
    if wanted and path.is_dir():
        expected = f"a configuration file; a Hugging Face folder is given as hf:{wanted}"
        raise BadValue(f"{wanted} is a folder, expected {expected}")
    raise UnknownName("configuration", wanted, known)


def recipe_files() -> dict[str, Path]:
    """Name -> file of each recipe defined in YAML."""
    return {found.stem: found for found in sorted((folder() / "recipes").glob("*.yaml"))}


def recipe_file(wanted: str) -> Path | None:
    """The file of the recipe `wanted`, given as 'bf16_grads' or, outside a checkout, as 'configs/recipes/bf16_grads.yaml'; None: there is none."""
    path = Path(wanted)
    ours = path.suffix in YAML and path.parent == Path("configs/recipes") and not path.exists()
    return recipe_files().get(path.stem if ours else wanted.strip().lower().replace("-", "_"))


def label(path: Path) -> str:
    """A file's display name: a shipped one by its name, wherever it is installed."""
    return f"mpbridge's {path.stem}" if path.is_absolute() and path.is_relative_to(folder()) else str(path)


VERSION = "0.1.0"
"""mpbridge's own release. pyproject.toml's [project] has the same."""
DISTRIBUTION = "mpbridge-precision"
"""The project's name on a package index; `mpbridge` there is another project's program. pyproject.toml's [project] has the same."""
PUBLISHED = False
"""Whether that index has it."""


def install(extra: str = "") -> str:
    """How to install mpbridge with an extra, as in `pip install -e '.[hf]' in a checkout of mpbridge`."""
    part = f"[{extra}]" if extra else ""
    return f"pip install '{DISTRIBUTION}{part}'" if PUBLISHED else f"pip install -e '.{part}' in a checkout of mpbridge"
