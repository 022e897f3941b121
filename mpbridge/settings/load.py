"""Layers of plain data (a file, the command line) merged into one tree that records where each value came from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpbridge.common.errors import MOST_NAMED, BadValue, Contradiction, UnknownName, cut
from mpbridge.common.shipped import configuration, label
from mpbridge.precision.config import TWINS
from mpbridge.precision.yaml_loader import load_yaml, read_yaml, said, with_exponents
from mpbridge.settings.huggingface.folder import is_reference
from mpbridge.settings.huggingface.section import tree
from mpbridge.settings.other_recipe import KEPT, carried, dropped, is_list, kept, renames, said_of_kept
from mpbridge.settings.schema import SECTIONS

Tree = dict[str, Any]
COMMAND_LINE = "the command line"
SINGLE = ("mixed_precision", "engine", "emulate", "target", "te")
TOP = (*SINGLE, *SECTIONS)
"""The top-level keys of a configuration file."""
EXTENDS = "extends"
"""The key of a file that names the configuration below it."""
_TWIN = dict(TWINS) | {b: a for a, b in TWINS}
_MODULES = "mixed_precision.modules."
MOST_VALUES, DEEPEST = 20_000, 12
"""Limits on a configuration's values and nesting levels, far above any real one."""
_ENDLESS = f"it refers to itself, or exceeds {MOST_VALUES:,} values or {DEEPEST} levels"


@dataclass(slots=True, kw_only=True)
class ConfigLayers:
    """The merged tree, with the source of every leaf ("optimizer.lr" -> "gpt_tiny.yaml"), the faults found while reading, and notes on what a layer dropped."""

    tree: Tree = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, layer: Mapping[str, Any], source: str) -> None:
        """Merges `layer` over the tree: mappings are merged, everything else is replaced."""
        layer = self._known(layer, source)
        if layer.get("mixed_precision") is not None:
            layer["mixed_precision"] = self._over(layer["mixed_precision"], source)
        self._merge(self.tree, layer, source)

    def _known(self, layer: Mapping[str, Any], source: str) -> Tree:
        """`layer` with recipe names as {recipe: name}, without unknown sections."""
        out: Tree = {}
        strange = [name for name in layer if name not in TOP]
        for name in strange[:MOST_NAMED]:
            self.faults.append(f"{cut(name)} (from {source}): {UnknownName('section', str(name), TOP)}")
        if len(strange) > MOST_NAMED:
            self.faults.append(f"{len(strange) - MOST_NAMED:,} further unknown sections (from {source})")
        for name, value in ((name, value) for name, value in layer.items() if name in TOP):
            if name in SECTIONS and value is None:
                out[name] = {}
            elif name in SECTIONS and not isinstance(value, Mapping):
                expected = f"a mapping of settings, as in {name}.key=value"
                self.faults.append(f"{name}={value!r} (from {source}): expected {expected}")
            else:
                named = name == "mixed_precision" and isinstance(value, (str, int)) and not isinstance(value, bool)
                # the recipe names 32 and 16 are numbers in YAML
                out[name] = {"recipe": str(value)} if named else value
        return out

    def _over(self, precision: Any, source: str) -> Any:
        """`precision` as it is merged, after what an earlier layer set and this one overrides was removed: another recipe and its additions, the other one of a pair of equivalent fields."""
        below = self.tree.get("mixed_precision")
        if is_list(precision) or renames(precision, below):
            return self._replaced(precision, below, source)
        if is_list(below):
            what = f"a list of stages, which single fields (from {source}) cannot change"
            self.faults.append(f"mixed_precision holds {what}: give mixed_precision=NAME")
            self._forget(self.tree, ("mixed_precision",))
        elif isinstance(precision, Mapping) and isinstance(below, dict):
            for name in precision:
                if name in _TWIN and _TWIN[name] not in precision:
                    self._forget(below, ("mixed_precision", _TWIN[name]))
        return precision

    def _replaced(self, precision: Any, below: Any, source: str) -> Any:
        """`precision`, another recipe or a list of stages, with what it keeps of the setting `below`, which is removed."""
        parts = precision if is_list(precision) else [precision]
        try:
            keeps = kept(below, stated={*KEPT}.intersection(*map(said_of_kept, parts)))
        except Contradiction as error:
            self.faults += [f"{fault} (from {source})" for fault in error.faults]
            keeps = {}
        # the nearest place that has one wins; what is not a single value, which is reported later, has none
        places = {name: ("mixed_precision", "mixed_precision.recipe", f"mixed_precision.{name}") for name in keeps}
        origins = {name: self.origin[one] for name, ways in places.items() for one in ways if one in self.origin}
        if gone := ", ".join(dropped(precision, below)):
            old = f"recipe {below['recipe']}" if "recipe" in below else "the setting"
            new = "a list of stages" if is_list(precision) else f"recipe {precision['recipe']}"
            self.notes.append(f"mixed_precision: {gone} dropped together with {old}, which {new} (from {source}) replaces")  # fmt: skip
        self._forget(self.tree, ("mixed_precision",))
        if is_list(precision):
            return carried(precision, keeps)
        self.tree["mixed_precision"] = dict(keeps)
        self.origin |= {f"mixed_precision.{name}": origin for name, origin in origins.items()}
        return precision

    def _forget(self, node: Tree, path: tuple[str, ...]) -> None:
        """Removes the last key of `path` from `node`, which the others lead to, and the sources of all values below it."""
        if path[-1] in node:
            for leaf in _leaves(node.pop(path[-1]), path):
                self.origin.pop(".".join(leaf), None)

    def _merge(self, into: Tree, layer: Mapping[str, Any], source: str, above: tuple[str, ...] = ()) -> None:
        for name, value in layer.items():
            path = (*above, str(name))
            if not isinstance(value, Mapping):
                self._forget(into, path)
                into[name], self.origin[".".join(path)] = value, source
                continue
            if not isinstance(into.get(name), dict):
                self._forget(into, path)
                into[name] = {}
            self._merge(into[name], value, source, path)


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The paths of the single values of a tree. They are tuples, since a module's glob contains dots of its own."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(item, (*path, str(name)))
    else:
        yield path


def read(path: str | os.PathLike[str] | None, overrides: Iterable[str] = ()) -> ConfigLayers:
    """The layers of a YAML file (above those that it `extends`), a shipped configuration given by name, or 'hf:DIR' (None: nothing), and of 'section.key=value' overrides;
    later layers override earlier ones.

    Faults are collected in the result. Raises BadValue only if nothing can be read at all (invalid YAML, or not a mapping), and UnknownName for a
    missing file.
    """
    layers, name = ConfigLayers(), None if path is None else os.fspath(path)
    if name is not None and is_reference(name):
        layers.add(tree(name), name)
    elif name is not None:
        for one, data in reversed(_chain(Path(name) if Path(name).exists() else configuration(name))):
            layers.add(data, label(one))
    layers.add(dotted(overrides, layers.faults), COMMAND_LINE)
    return layers


def _chain(path: Path) -> list[tuple[Path, Tree]]:
    """The file, the one that it `extends`, and so on: a path, looked for next to the file, or the name of a shipped configuration. Raises as `read`."""
    found: list[tuple[Path, Tree]] = []
    while True:
        if any(path.resolve() == one.resolve() for one, _ in found):
            way = " -> ".join(str(one) for one in (*(one for one, _ in found), path))
            raise BadValue(f"configuration {found[0][0]}: extends itself through {way}")
        data = read_file(path)
        base = data.pop(EXTENDS, None)
        found.append((path, data))
        if base is None:
            return found
        if not isinstance(base, str) or is_reference(base):
            expected = "a file, or the name of a shipped configuration"
            raise BadValue(f"configuration {path}: {EXTENDS}={base!r}: expected {expected}")
        beside = path.parent / base
        path = beside if beside.is_file() else configuration(base)


def read_file(path: Path) -> Tree:
    """The mapping in a YAML file; recipe files that it names are also looked for next to it. Raises BadValue."""
    import yaml

    try:
        data = read_yaml(path)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadValue(f"configuration {path} cannot be read: {said(error)}") from None
    if data is None:
        return {}
    if not _is_tree(data):
        raise BadValue(f"configuration {path}: {_ENDLESS}")
    if not isinstance(data, dict):
        expected = f"a mapping of sections ({', '.join((EXTENDS, *TOP))})"
        raise BadValue(f"configuration {path}: expected {expected}, got {type(data).__name__}")
    if "mixed_precision" in data:
        data["mixed_precision"] = _beside(data["mixed_precision"], path.parent)
    return data


def dump_yaml(data: Mapping[str, Any]) -> str:
    """`data` as YAML with one line per setting; lists stay on one line."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def represent_sequence(self, tag: Any, sequence: Any, flow_style: Any = None) -> Any:
            plain = all(not isinstance(item, Mapping) for item in sequence)
            return super().represent_sequence(tag, sequence, flow_style=plain)

    with_exponents(Dumper)
    return str(yaml.dump(dict(data), Dumper=Dumper, sort_keys=False, default_flow_style=False, width=140))


def dotted(overrides: Iterable[str], faults: list[str]) -> Tree:
    """The tree described by 'a.b=value' texts, with values read as YAML; what cannot be read is added to `faults`."""
    out: Tree = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        try:
            if not equals or not all(name.strip().split(".")):
                raise BadValue("expected key=value, as in optimizer.lr=3e-4")
            _put(out, name.strip(), _value(value))
        except BadValue as error:
            faults.append(f"{text!r}: {error}")
    return out


def _value(text: str) -> Any:
    import yaml

    if not text.strip():
        raise BadValue("no value; write null to unset it, or '' for an empty string")
    try:
        value = load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadValue(f"not a YAML value: {said(error)}") from None
    if not _is_tree(value):
        raise BadValue(_ENDLESS)
    return value


def _is_tree(data: Any) -> bool:
    """Whether `data` is of limited size: YAML's aliases can make it refer to itself, or repeat a part a million times."""
    left, level = MOST_VALUES, [data]
    for _ in range(DEEPEST):
        wholes = (item for item in level[:left] if isinstance(item, (dict, list)))
        level = [part for item in wholes for part in (item.values() if isinstance(item, dict) else item)]
        left -= len(level)
        if not level or left < 0:
            break
    return left >= 0 and not level


def _put(tree: Tree, name: str, value: Any) -> None:
    # a module's glob itself contains dots
    way = ["mixed_precision", "modules", name.removeprefix(_MODULES)] if name.startswith(_MODULES) else name.split(".")
    if name == "mixed_precision" and isinstance(value, (str, int)) and not isinstance(value, bool):
        way, value = ["mixed_precision", "recipe"], str(value)
    node = tree
    for step in way[:-1]:
        node = node.setdefault(step, {})
        if not isinstance(node, dict):
            raise BadValue(f"{step} already has a single value")
    old = node.get(way[-1])
    if isinstance(old, dict) and not isinstance(value, dict):
        raise BadValue(f"{way[-1]} already has settings below it")
    node[way[-1]] = old | value if isinstance(old, dict) else value


def _beside(precision: Any, folder: Path) -> Any:
    """`precision` with the paths of recipe files resolved: those that exist only next to the configuration get its folder."""
    if isinstance(precision, list):
        return [_beside(stage, folder) for stage in precision]
    if isinstance(precision, dict):
        return precision | {"recipe": _beside(precision["recipe"], folder)} if "recipe" in precision else precision
    if not isinstance(precision, str):
        return precision
    path, colon, function = precision.rpartition(":") if ".py:" in precision else (precision, "", "")
    is_file = path.endswith((".yaml", ".yml", ".py"))
    if is_file and not Path(path).exists() and (folder / path).exists():
        return f"{folder / path}{colon}{function}"
    return precision
