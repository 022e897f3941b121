"""The recipe registry: one private dict, a read-only view, and three functions (register, recipe, get_mixed_precision_config)."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, overload

from mpbridge.common.errors import BadValue, DuplicateName, MpbridgeError, RecipeError, UnknownName, cut
from mpbridge.common.shipped import recipe_file, recipe_files
from mpbridge.common.traits import engine_names, traits
from mpbridge.common.versions import entry_points
from mpbridge.precision import resolve as configs
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.recipe import Factory, Recipe
from mpbridge.precision.recipe_code import call, function
from mpbridge.precision.recipes import BUILT_IN
from mpbridge.precision.yaml_loader import read_yaml, said

F = TypeVar("F", bound=Factory)
EVIDENCE = "evidence"
"""Key of a recipe file for its evidence (`mpbridge tune`); not a field, and read only by `show`."""
ENGINE = "engine"
"""Key of a recipe file for its engine; not a field: the run's own `engine` setting takes precedence."""
RECIPE_FILE: frozenset[str] = frozenset({*MixedPrecisionConfig.__dataclass_fields__, "extends", EVIDENCE, ENGINE})
"""Every key of a recipe file: a config's fields, the recipe that it extends, its evidence, and its engine."""
ENTRY_POINTS = "mpbridge.recipes"
"""Entry point group in which other packages provide recipes: name -> a factory; loaded only on use."""
FOREIGN = "names of another model"
"""Evidence key of a recipe whose `modules:` match the linears of that model instead of megatron-core's GPT."""

_by_name: dict[str, Recipe] = {}
_alias_of: dict[str, str] = {}
_filled = False
_lock = threading.RLock()
"""Held while the two tables change: a reader finds all recipes or waits."""


class _Window(Mapping[str, Recipe]):
    """Read-only view of every known recipe by canonical name, including those of installed packages."""

    def __getitem__(self, name: str) -> Recipe:
        return recipe(name)

    def __iter__(self) -> Any:
        _fill()
        return iter(tuple(_by_name))

    def __len__(self) -> int:
        _fill()
        return len(_by_name)

    def get(self, name: str, default: Any = None) -> Any:
        """The recipe, or `default`: Mapping's own method only catches KeyError."""
        return recipe(name) if name in self else default

    def __contains__(self, name: object) -> bool:
        _fill()
        return isinstance(name, str) and (key(name) in _by_name or key(name) in _alias_of)


recipes: Mapping[str, Recipe] = _Window()
aliases: Mapping[str, str] = MappingProxyType(_alias_of)
"""Alias -> canonical name."""

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "no": "accelerate's word for FP32 arithmetic: fp32",
        "16_true": "FP16 weights without main weights, which no recipe here keeps; fp16_mixed has FP32 main weights",
        "float8": "does not name a scaling: bf16_with_fp8_current_scaling_mixed is tensorwise, bf16_with_mxfp8_mixed has blocks of 32",
        "rowwise": "torchao's scaling, one scale per row: bf16_with_fp8_rowwise on engine fsdp2",
        "transformer_engine": "a library, not a recipe: mpbridge list shows the recipes that need it",
    }
)
"""Words of other stacks without a single equivalent recipe -> what to choose. Hints, never aliases."""
ANY = "mpbridge list shows the names, bf16_mixed and fp8_cs among them; a file is given with its ending, as in recipe.yaml"
"""What to choose in place of a name that is near none."""


def key(name: str) -> str:
    """The canonical spelling: lower case, underscores."""
    return name.strip().lower().replace("-", "_")


def _fill() -> None:
    """Fills the tables once. Raises DuplicateName at every call while an installed package takes a name that exists: neither of two meanings is chosen silently."""
    global _filled
    if _filled:
        return
    with _lock:
        if _filled:
            return
        names, others = dict[str, Recipe](), dict[str, str]()
        for entry in BUILT_IN:
            _store(entry, names, others)
        for point in entry_points(ENTRY_POINTS):
            name = key(point.name)
            if name in names or name in others:
                raise DuplicateName(
                    f"entry point {point.value!r} provides a recipe named {name!r}, which already exists: rename it in its package, or uninstall that"
                )
            # its package is loaded only when the recipe is used, since it may import torch
            made = functools.partial(lambda point: call(point.load(), point.value), point)
            names[name] = Recipe(name=name, make=made, summary=f"from {point.value}", source=point.value, foreign=True)
        _by_name.update(names)
        _alias_of.update(others)
        _filled = True


def _store(entry: Recipe, names: dict[str, Recipe], others: dict[str, str]) -> None:
    """Adds a recipe and its aliases to the tables, or nothing."""
    for name in (entry.name, *entry.aliases):
        if not name or _is_place(name):
            raise BadValue(f"{name!r} cannot name a recipe: it would be read as a file or a function")
    before, own = names.get(entry.name), set[str]()
    if getattr(entry.make, "__module__", None) == "__main__" and before is not None and before.source == entry.source:
        own = {
            entry.name,
            *before.aliases,
        }  # a cell, or a line of an interactive session, ran again and replaces its recipe
    taken = [name for name in (entry.name, *entry.aliases) if name not in own and (name in names or name in others)]
    if taken:
        raise DuplicateName(
            f"a recipe named {', '.join(map(repr, taken))} already exists: choose another name (registered names: mpbridge list)"
        )
    names[entry.name] = entry
    others.update(dict.fromkeys(entry.aliases, entry.name))
    for name in own.difference(entry.aliases):
        others.pop(name, None)


@overload
def register(factory: F, /) -> F: ...
@overload
def register(
    *,
    name: str | None = None,
    aliases: tuple[str, ...] = (),
    summary: str = "",
    status: Literal["validated", "experimental"] = "experimental",
    source: str = "",
    engine: str | None = None,
    hints: tuple[str, ...] = (),
) -> Callable[[F], F]: ...
def register(
    factory: F | None = None,
    /,
    *,
    name: str | None = None,
    aliases: tuple[str, ...] = (),
    summary: str = "",
    engine: str | None = None,
    hints: tuple[str, ...] = (),
    **metadata: Any,
) -> Any:
    """Decorator, bare or with options: registers a function that returns a MixedPrecisionConfig under its own or a given name.

    What its fields say is not asked for: hardware, engine and hints follow from them (`Recipe`). engine: where several could run it; hints:
    beside those. Nothing is stored when a name or an alias is taken (DuplicateName) or reads as a file or function, for what cannot be called (BadValue),
    or for an engine that is neither built in nor provided by an installed package (UnknownName).
    """

    def enter(made_by: F) -> F:
        _fill()
        if isinstance(aliases, str):
            raise BadValue(f"aliases={aliases!r}: expected a tuple of names, as in ({aliases!r},)")
        if not callable(made_by):
            raise BadValue(f"register got {made_by!r}, expected a function that returns a MixedPrecisionConfig")
        if engine is not None and engine not in engine_names():
            raise UnknownName("engine", str(engine), engine_names())
        own_name = getattr(made_by, "__name__", "")
        if not (name or own_name.isidentifier()):
            raise BadValue(f"{made_by!r} has no name of its own: register(name=...)")
        described = summary or (inspect.getdoc(made_by) or "").partition("\n")[0]
        described = described or f"registered by {getattr(made_by, '__module__', 'a caller')}"
        source = f"{getattr(made_by, '__module__', '?')}:{getattr(made_by, '__qualname__', '?')}"
        more, spelled = {"source": source, **metadata}, tuple(map(key, aliases))
        named = key(name or own_name)
        entry = Recipe(
            name=named, make=made_by, summary=described, aliases=spelled, prefers=engine, advice=hints, **more
        )
        with _lock:
            _store(entry, _by_name, _alias_of)
        return made_by

    return enter if factory is None else enter(factory)


def unregister(name: str) -> None:
    """Takes a recipe and its aliases out again (tests, notebooks)."""
    with _lock:
        entry = recipe(name)
        del _by_name[entry.name]
        for alias in entry.aliases:
            del _alias_of[alias]


def recipe(name: str) -> Recipe:
    """The entry of that name or alias, in any spelling. Raises UnknownName with the nearest names."""
    _fill()
    found = _alias_of.get(key(name), key(name))
    if found not in _by_name:
        unknown = UnknownName("recipe", name, [*_by_name, *_alias_of, *recipe_files()])
        hint = ELSEWHERE.get(key(name)) or (None if unknown.near else ANY)
        if hint is not None:
            unknown.args = (f"no recipe named {name!r}: {hint}",)
        raise unknown
    return _by_name[found]


def get_mixed_precision_config(name: str | MixedPrecisionConfig | Path, *, code: bool = True) -> MixedPrecisionConfig:
    """A fresh config for a name, 'package.module:function', 'file.py:function', a YAML file, or a copy of a given config.

    code: False refuses functions: for configurations that came with a checkpoint. A function that a YAML file extends is refused in any case:
    whoever names the file has not named the code."""
    if isinstance(name, MixedPrecisionConfig):
        return name.derive()
    text = str(name)
    if (file := _file(text)) is not None:
        return _from_yaml(file)
    if _is_place(text):
        if not code:
            why = "is code that comes with this configuration: name the recipe yourself (--recipe)"
            raise RecipeError(f"recipe={text!r} {why}")
        return call(function(text), text)
    entry = recipe(text)
    return call(entry.make, entry.name)


def resolve(
    config: str | Path | MixedPrecisionConfig,
    *,
    optimizer: Mapping[str, Any] | object | None = None,
    layers: int | None = None,
) -> PrecisionPolicy:
    """The policy that a config, or the recipe of that name, means: `precision.resolve.resolve`, for everything that names a recipe.

    Raises what that raises, and UnknownName or RecipeError for a name."""
    given = get_mixed_precision_config(config) if isinstance(config, (str, Path)) else config
    return configs.resolve(given, optimizer=optimizer, layers=layers)


def _file(name: str) -> Path | None:
    """The YAML file that `name` means: its path, or the name of a shipped one; None: it means none."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else None
    return path if (path is not None and path.exists()) or name in recipes else recipe_file(name) or path


def _is_place(name: str) -> bool:
    """Whether `name` says where a recipe is: a file or a function."""
    return ":" in name or name.endswith((".yaml", ".yml", ".py"))


def same_recipe(one: str, other: str) -> bool:
    """Whether two names mean one recipe: in another spelling, by an alias, or as another path to one file."""
    return _identity(one) == _identity(other)


def _identity(name: str) -> str:
    path, dot_py, function = name.partition(".py:")
    try:
        file = Path(path + ".py") if dot_py else _file(name)
        if file is not None:
            return f"{file.resolve()}:{function}"
    except (OSError, ValueError, RuntimeError):  # a name that no file can have; its use says so
        return name
    return name if _is_place(name) else _alias_of.get(key(name), key(name))


def describe(name: str) -> Recipe:
    """The entry behind any accepted spelling. A file's engine and advice are those of the recipe that it extends, where its own fields ask for none."""
    file = _file(name)
    if file is None and not _is_place(name):
        return recipe(name)
    chain = _contents(name)
    last = str(chain[-1].get("extends") or "") if chain else ""  # a named recipe, or a file that cannot be read
    base = recipes[last] if last and not _is_place(last) and last in recipes else None
    stated = next((data[ENGINE] for data in chain if data.get(ENGINE) is not None), None)
    engine = None if stated is None else traits(str(stated)).name  # UnknownName for one that there is not
    return Recipe(
        name=name,
        make=lambda: get_mixed_precision_config(name),
        summary=f"from {name}",
        source=name,
        prefers=engine or (None if base is None else base.prefers),
        advice=() if base is None else base.advice,
    )


def _chain(path: Path, depth: int = 0) -> Iterator[dict[str, Any]]:
    """The contents of a recipe file and of the files that it extends, as far as they can be read; the use of one that cannot be read says so."""
    import yaml

    try:
        data = read_yaml(path)
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError, MpbridgeError):
        return
    if isinstance(data, dict):
        yield data
        base = str(data.get("extends") or "")
        if base.endswith((".yaml", ".yml")) and depth < _DEEPEST:
            yield from _chain(path.parent / base, depth + 1)


_DEEPEST = 20
"""Files that extend each other in a chain; a circle ends there, and using one names it."""


def _contents(name: str) -> list[dict[str, Any]]:
    """What `_chain` reads of the recipe file that `name` means; empty for any other recipe."""
    file = _file(name)
    return [] if file is None else list(_chain(file))


def evidence_of(name: str) -> Mapping[str, Any]:
    """A recipe file's evidence; empty for any other recipe."""
    found = next(iter(_contents(name)), {}).get(EVIDENCE)
    return found if isinstance(found, Mapping) else {}


def model_of(name: str) -> str | None:
    """The model whose linears a recipe file's rules under `modules:` name, where it is none of megatron-core's: by the evidence of the file that wrote them.

    A file that extends another has that one's rules unless it states its own."""
    for data in _contents(name):
        evidence = data.get(EVIDENCE)
        if isinstance(evidence, Mapping) and evidence.get(FOREIGN):
            return str(evidence[FOREIGN])
        if "modules" in data:
            return None
    return None


def extended_rules(name: str) -> tuple[str, ...]:
    """The globs of every rule under `modules:` in a recipe file and those that it extends, whether the file has it or replaces it; empty for any other recipe."""
    chain = _contents(name)
    base = str(chain[-1].get("extends") or "") if chain else ""
    start = get_mixed_precision_config(base).modules if base and not _is_place(base) else None
    each = (start, *(data.get("modules") for data in reversed(chain)))
    return tuple(dict.fromkeys(glob for rules in each for glob in rules or {}))


def _from_yaml(path: Path, seen: tuple[Path, ...] = ()) -> MixedPrecisionConfig:
    import yaml

    try:
        here = path.resolve()
        if here in seen:
            way = " -> ".join(p.name for p in (*seen, here))
            raise RecipeError(f"recipe file {path}: extends itself through {way}")
        data = read_yaml(path)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RecipeError(f"recipe file {cut(path)} cannot be read: {said(error)}") from error
    if not data and data in (None, {}):
        raise RecipeError(
            f"recipe file {path}: empty, expected fields or the recipe that it starts from, as in `extends: bf16_mixed`"
        )
    if not isinstance(data, dict):
        raise RecipeError(f"recipe file {path}: expected a mapping of fields, got {type(data).__name__}")
    base = data.pop("extends", None)
    data.pop(EVIDENCE, None)
    engine = data.pop(ENGINE, None)
    try:
        if engine is not None:
            traits(str(engine))
        if base is None:
            start = MixedPrecisionConfig()
        elif str(base).endswith((".yaml", ".yml")):
            start = _from_yaml(path.parent / str(base), (*seen, here))
        elif _is_place(str(base)):
            raise RecipeError(
                f"recipe file {path} extends code, {base}: a file cannot make code run. If you trust it, name it yourself "
                f"(--recipe {base}) and give the file's other fields as settings (mixed_precision.{next(iter(data), 'FIELD')}=...)"
            )
        else:
            start = get_mixed_precision_config(str(base))
        if "recipe" in data:
            raise RecipeError(
                f"recipe file {path}: no field named 'recipe'; the recipe that a file starts from is named by `extends: {cut(data['recipe'])}`"
            )
        return MixedPrecisionConfig.from_data(data, start)
    except RecipeError:
        raise
    except MpbridgeError as error:
        raise RecipeError(f"recipe file {path}: {error}") from error
