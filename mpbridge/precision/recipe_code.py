"""Recipes that are code: a function of a module or of a Python file, found and called. Nothing here decides whether it may run."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from mpbridge.common.errors import MpbridgeError, RecipeError, UnknownName
from mpbridge.precision.config import MixedPrecisionConfig


def call(factory: Any, name: str) -> MixedPrecisionConfig:
    """A config of its own from a factory. Raises RecipeError, with what the factory raised or returned instead."""
    try:
        made = factory()
    except MpbridgeError as error:
        raise RecipeError(f"recipe {name!r} failed: {error}") from error
    except Exception as error:
        # a KeyError in a factory is the factory's fault, not an unknown name
        raise RecipeError(f"recipe {name!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(made, MixedPrecisionConfig):
        raise RecipeError(f"recipe {name!r} returned {type(made).__name__}, expected a MixedPrecisionConfig")
    return made.derive()


def function(text: str) -> Any:
    """The function behind 'package.module:function' or 'file.py:function'. Raises RecipeError, UnknownName."""
    where, colon, name = text.rpartition(":")
    if not colon:
        raise RecipeError(f"recipe {text!r} names a file: say which of its functions, as in {text}:my_recipe")
    module = _module_from_file(Path(where)) if where.endswith(".py") else _module(where)
    usable = {known: value for known, value in vars(module).items() if callable(value) and not known.startswith("_")}
    # what the file defines, rather than what it imports
    own = [known for known, value in usable.items() if getattr(value, "__module__", "") == module.__name__]
    public = own or list(usable)
    if not hasattr(module, name):
        raise UnknownName(f"function in {where}", name, public)
    if not callable(found := getattr(module, name)):
        raise RecipeError(
            f"recipe {text!r}: {name} is of type {type(found).__name__}, expected a function that returns a MixedPrecisionConfig ({where} has {', '.join(public) or 'no function'})"
        )
    return found


def _module(where: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except Exception as error:
        raise RecipeError(f"recipe module {where!r} cannot be imported: {type(error).__name__}: {error}") from error


def _module_from_file(path: Path) -> ModuleType:
    if not path.is_file():
        what = "FILE.py:FUNCTION, a YAML file or a name (mpbridge list)"
        raise RecipeError(f"recipe file {path}: no such file, expected {what}")
    name = f"mpbridge_recipe_{path.stem}_{abs(hash(path.resolve())):x}"
    if name in sys.modules:  # executed once: its @register lines must not run twice
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a .py file always has a spec
    assert spec.loader is not None  # and a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise RecipeError(f"recipe file {path} cannot be executed: {type(error).__name__}: {error}") from error
    return module
