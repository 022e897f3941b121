"""Checks Python configurations (torchtitan's config_registry functions, Megatron Bridge's recipes): text read here against code run there.

    python scripts/evidence/stacks/python_configs.py --torchtitan CHECKOUT --bridge CHECKOUT

Each function is read as text by `mpbridge import` and then actually called, with stand-ins for all imports of its file except its own
repository's configuration files, precision classes and torch. Counts functions that were read, refused by name, called, and read as they run. Exit
code 0 if nothing crashed and every called function reads alike. Needs torch.
"""

from __future__ import annotations

import argparse
import ast
import collections
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

# a configuration that needs the network is not run: it would retry five times
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
sys.path[:] = [
    path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent
]  # names of packages


class StandIn(types.ModuleType):
    """A module that has every attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "model_registry":
            return _registry
        made = MagicMock(name=name, side_effect=fresh)
        made.Config = MagicMock(side_effect=lambda *given, **named: fresh(*given, made_by=name, **named))
        made.from_hf_pretrained = MagicMock(side_effect=fresh)
        setattr(self, name, made)
        return made


def fresh(*given: Any, **named: Any) -> Any:
    """An object with these attributes and every other; a new one for each call, since recipes set attributes on it."""
    made = MagicMock()
    for name, value in named.items():
        setattr(made, name, value)
    return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads the named modules from their files; everything else in those packages (and anything not installed) is a stand-in."""

    def __init__(self, source: Path, packages: tuple[str, ...], real: Callable[[str], bool]) -> None:
        self.source, self.packages, self.real = source, packages, real

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in self.packages:
            return None
        place = self.source.joinpath(*name.split("."))
        if self.real(name):
            package = place.is_dir()
            file = place / "__init__.py" if package else place.with_suffix(".py")
            if file.is_file():
                return importlib.util.spec_from_file_location(
                    name, file, submodule_search_locations=[str(place)] if package else None
                )
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return StandIn(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__path__ = []


class Rest(Finder):
    """Stand-ins for imports of the checkout that are not installed; the last finder."""

    def __init__(self, checkouts: list[Path]) -> None:
        self.checkouts = tuple(str(path) for path in checkouts)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        asking = sys._getframe(1)
        while asking.f_back is not None and "importlib" in asking.f_code.co_filename:
            asking = asking.f_back
        inside = asking.f_code.co_filename.startswith(self.checkouts)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if inside else None


def functions(file: Path) -> Iterator[str]:
    """Public functions of a file without required arguments."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            needed = len(node.args.args) - len(node.args.defaults)
            needed += sum(default is None for default in node.args.kw_defaults)
            if not needed:
                yield node.name


def bridge(checkout: Path) -> tuple[list[tuple[Path, str]], Callable[[Any], dict[str, Any] | None]]:
    """Files with their module names, and a function from a recipe's ConfigContainer to fields."""
    source = checkout / "src"
    base = "megatron.bridge."
    own = (f"{base}recipes", f"{base}perf_recipes", f"{base}training.mixed_precision", f"{base}training.flat")

    def real(name: str) -> bool:
        return name.startswith(own) and not name.endswith("run_plugins")

    sys.meta_path.insert(0, Finder(source, ("megatron",), real))
    files = [
        (file, ".".join(file.relative_to(source).with_suffix("").parts))
        for folder in ("recipes", "perf_recipes")
        for file in sorted((source / "megatron" / "bridge" / folder).rglob("*.py"))
        if file.name not in ("__init__.py", "run_plugins.py", "common.py", "environment.py")
        and "utils" not in file.parts
    ]
    from mpbridge.interop.stacks.megatron_bridge import _SECTIONS
    from mpbridge.interop.stacks.megatron_bridge_import import FIELDS, read_data

    mixed = importlib.import_module(f"{base}training.mixed_precision")

    def said(made: Any) -> dict[str, Any] | None:
        policy = getattr(made, "mixed_precision", None)
        if isinstance(policy, str):
            policy = mixed.get_mixed_precision_config(policy)
        if not isinstance(policy, mixed.MixedPrecisionConfig):
            return None
        data: dict[str, Any] = {"mixed_precision": {name: _plain(getattr(policy, name)) for name in FIELDS}}
        for section, names in _SECTIONS.items():
            held = getattr(made, section, None)
            if section != "mixed_precision" and held is not None:
                values = {name: _plain(vars(held).get(name, getattr(held, name, None))) for name in names}
                data[section] = {name: value for name, value in values.items() if not isinstance(value, MagicMock)}
        return ours("megatron-bridge", read_data(data, version="0.6"))

    return files, said


def torchtitan(checkout: Path) -> tuple[list[tuple[Path, str]], Callable[[Any], dict[str, Any] | None]]:
    """Files with their module names, and a function from a Trainer.Config to fields."""
    own = ("torchtitan.config.configs",)

    def real(name: str) -> bool:
        return name.endswith("config_registry") or name.startswith(own)

    sys.meta_path.insert(0, Finder(checkout, ("torchtitan",), real))
    configs = importlib.import_module("torchtitan.config.configs")
    sys.modules["torchtitan.config"].TrainingConfig = configs.TrainingConfig  # type: ignore[attr-defined]
    files = [
        (file, ".".join(file.relative_to(checkout).with_suffix("").parts))
        for file in sorted((checkout / "torchtitan").rglob("config_registry.py"))
    ]
    from mpbridge.interop.stacks.torchtitan import LINEARS

    def said(made: Any) -> dict[str, Any] | None:
        training = getattr(made, "training", None)
        if not isinstance(training, configs.TrainingConfig):
            return None
        spec = made.model_spec
        asked = vars(spec).get("asked") or {}
        words = [one.made_by for one in asked.get("converters", ())]
        quant = next((LINEARS[word] for word in words if word in LINEARS), None)
        return {
            "storage": training.dtype, "compute": training.mixed_precision_param, "wire": training.mixed_precision_reduce,
            "quantized": quant and (quant.format, quant.scaling),
        }  # fmt: skip

    return files, said


def _registry(*given: Any, **named: Any) -> Any:
    """model_registry: returns its arguments."""
    return fresh(asked=named)


def _plain(value: Any) -> Any:
    text = str(value)
    return text if text.startswith("torch.") else value


def ours(stack: str, found: Any) -> dict[str, Any]:
    """The same facts from an import."""
    if stack == "megatron-bridge":
        from mpbridge.interop.stacks.meaning import rows

        return {**rows(found.meaning), "engine": found.engine}
    meaning, quant = found.meaning, found.meaning.regions[0].quant if found.meaning.regions else None
    return {
        "storage": meaning.storage.value, "compute": meaning.compute.value, "wire": meaning.wire.value,
        "quantized": None if quant is None else (quant.format, quant.scaling),
    }  # fmt: skip


def judge(stack: str, files: list[tuple[Path, str]], said: Callable[[Any], dict[str, Any] | None]) -> bool:
    """Reads and calls every function; prints differences and a line of counts."""
    from mpbridge.common.errors import MpbridgeError
    from mpbridge.interop.stacks.importers import read_file

    count: collections.Counter[str] = collections.Counter()
    for file, module_name in files:
        try:
            module: Any = importlib.import_module(module_name)
        except Exception as error:  # a file that cannot be run with stand-ins is only read
            print(f"{module_name}: not run: {type(error).__name__}: {str(error)[:80]}")
            module = None
        for function in functions(file):
            try:
                found = read_file(Path(f"{file}:{function}"), stack=stack)
            except MpbridgeError:
                count["refused by name"] += 1
                continue
            count["read"] += 1
            try:
                there = None if module is None else said(getattr(module, function)())
            except Exception:
                there = None
            if there is None:
                count["read, not run"] += 1
                continue
            count["called"] += 1
            mine = ours(stack, found)
            count["alike"] += mine == there
            if mine != there:
                differs = {
                    name: (mine.get(name), there.get(name))
                    for name in {*mine, *there}
                    if mine.get(name) != there.get(name)
                }
                print(f"{function}: text and run differ: {differs}")
    print(f"{stack}: {dict(count)}", flush=True)
    return count["called"] > 0 and count["called"] == count["alike"]


def main() -> int:
    """The command line of this script."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--torchtitan", type=Path)
    arguments.add_argument("--bridge", type=Path)
    args = arguments.parse_args()
    sys.meta_path.append(Rest([path.resolve() for path in (args.torchtitan, args.bridge) if path is not None]))
    good = True
    if args.torchtitan is not None:
        good &= judge("torchtitan", *torchtitan(args.torchtitan.resolve()))
    if args.bridge is not None:
        good &= judge("megatron-bridge", *bridge(args.bridge.resolve()))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
