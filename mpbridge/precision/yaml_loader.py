"""PyYAML with floats as they are usually written: YAML 1.1 reads 1e-3 as text."""

from __future__ import annotations

import functools
import re
from typing import Any

MOST_CHARACTERS = 200_000
"""Of a file; PyYAML reads about 350,000 a second, and a configuration has a few thousand."""


@functools.cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
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

    pattern = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", pattern, list("-+0123456789."))
    return Loader


def load_yaml(text: str) -> Any:
    """The plain data in `text`. Raises yaml.YAMLError, also for a text above the limits on length and nesting."""
    import yaml

    if len(text) > MOST_CHARACTERS:
        raise yaml.YAMLError(f"{len(text):,} characters, expected at most {MOST_CHARACTERS:,}")
    try:
        return yaml.load(text, Loader=_loader())
    except RecursionError:
        raise yaml.YAMLError("nested too deeply to be a configuration") from None
