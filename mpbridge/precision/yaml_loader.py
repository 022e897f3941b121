"""PyYAML with floats as they are usually written: YAML 1.1 reads 1e-3 as text."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

from mpbridge.common.files import regular, why

MOST_CHARACTERS = 100_000
"""Of a file; PyYAML reads about 350,000 a second, and a configuration has a few thousand."""
MOST_BRACKETS = 50
"""That are open at once: PyYAML's time grows with the square of it."""
MOST_WRITTEN = 20_000
"""Keys and values in a file as it is written; PyYAML reads some 50,000 a second."""
MOST_BITS = 8192
"""Of a whole number, below the 4,300 digits that Python prints: one in hexadecimal may have any length."""
MOST_VALUES = 100_000
"""Keys and values with every alias written out: a few lines of aliases to aliases stand for billions."""


@functools.cache
def bounded_loader() -> Any:
    """PyYAML's SafeLoader, which raises yaml.YAMLError above MOST_WRITTEN and MOST_VALUES."""
    import yaml

    class Bounded(yaml.SafeLoader):
        written = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.written += 1
            if self.written > MOST_WRITTEN:
                raise yaml.YAMLError(f"more than {MOST_WRITTEN:,} keys and values")
            return super().compose_node(parent, index)

        def get_single_node(self) -> Any:
            return _of_bounded_size(super().get_single_node())

        def construct_yaml_int(self, node: Any) -> int:
            found: int = super().construct_yaml_int(node)
            if found.bit_length() > MOST_BITS:
                text = f"a whole number of more than {MOST_BITS:,} bits"
                raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)
            return found

    Bounded.add_constructor("tag:yaml.org,2002:int", Bounded.construct_yaml_int)
    return Bounded


@functools.cache
def _loader() -> Any:
    import yaml

    class Loader(bounded_loader()):  # type: ignore[misc]
        """Safe loading, plus 1e-3 and the like as numbers; a duplicate key is an error."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[Any] = set()
            for key_node, _ in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge":
                    continue
                name = self.construct_object(key_node, deep=deep)
                if isinstance(name, (str, int, float, bool)) and name in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {name!r} appears twice", key_node.start_mark
                    )
                if isinstance(name, (str, int, float, bool)):
                    seen.add(name)
            mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
            return mapping

    with_exponents(Loader)
    return Loader


def with_exponents(resolver: Any) -> None:
    """Makes a loader of PyYAML read 1e-3 as a float, or a dumper quote a text that this one would read so."""
    pattern = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    resolver.add_implicit_resolver("tag:yaml.org,2002:float", pattern, list("-+0123456789."))


def _of_bounded_size(node: Any) -> Any:
    """PyYAML's composed `node`, before anything is made of it. Raises yaml.YAMLError above MOST_VALUES, and for what holds itself.

    Merges (`<<`) count like every other alias: they are written out when mappings are made."""
    import yaml

    sizes: dict[int, int] = {}

    def size(one: Any) -> int:
        known = sizes.get(id(one))
        if known is not None:
            return known
        sizes[id(one)] = MOST_VALUES + 1  # until it is counted: what holds itself has no end
        parts = [] if isinstance(one, yaml.ScalarNode) else one.value
        found = 1 + sum(sum(map(size, part)) if isinstance(part, tuple) else size(part) for part in parts)
        sizes[id(one)] = found
        return found

    if node is not None and size(node) > MOST_VALUES:
        raise yaml.YAMLError(
            f"it refers to itself, or exceeds {MOST_VALUES:,} values once its aliases (*name) are written out"
        )
    return node


def load_yaml(text: str) -> Any:
    """The plain data in `text`. Raises yaml.YAMLError, also for a text above the limits on length, nesting and values."""
    found = _loaded(text)
    if isinstance(found, Exception):
        raise found
    return copy.deepcopy(found)


@functools.lru_cache(maxsize=16)
def _loaded(text: str) -> Any:
    """The data, or the exception: a command asks a recipe's file for several things, and each would read it again."""
    import yaml

    if len(text) > MOST_CHARACTERS:
        return yaml.YAMLError(f"{len(text):,} characters, expected at most {MOST_CHARACTERS:,}")
    if _open_brackets(text) > MOST_BRACKETS:
        return yaml.YAMLError("nested too deeply to be a configuration")
    try:
        return yaml.load(text, Loader=_loader())
    except RecursionError:
        return yaml.YAMLError("nested too deeply to be a configuration")
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        return error


def read_yaml(path: Path) -> Any:
    """The plain data in a file. Raises OSError, UnicodeDecodeError and yaml.YAMLError; never reads more than a configuration may have."""
    import yaml

    most = 4 * MOST_CHARACTERS  # UTF-8 has at most four bytes for a character
    with regular(path) as stream:
        raw = stream.read(most + 1)
    if len(raw) > most:
        raise yaml.YAMLError(f"more than {most:,} bytes, expected at most {MOST_CHARACTERS:,} characters")
    return load_yaml(raw.decode("utf-8"))


def said(error: Exception) -> str:
    """What an exception of reading YAML says, on one line, with the place that it means."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or not problem:
        return why(error)
    context = f", {error.context}" if getattr(error, "context", None) else ""  # type: ignore[attr-defined]
    return f"line {mark.line + 1}, column {mark.column + 1}: {' '.join(f'{problem}{context}'.split())}"


def _open_brackets(text: str) -> int:
    """How many brackets are open at once at most, those in quotes and comments counted too."""
    most = now = 0
    for bracket in re.findall(r"[\[{\]}]", text):
        now = now + 1 if bracket in "[{" else max(0, now - 1)
        most = max(most, now)
    return most
