"""Makes a Transformer Engine without its CUDA parts look uninstalled to code that checks for one.

The extra te-cpu installs the pure-Python wheel `transformer-engine`, whose import fails with a RuntimeError because of the missing libraries;
megatron-core expects an ImportError. The guard is installed by `import mpbridge` and does nothing until transformer_engine is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAME = "transformer_engine"
_LIBRARIES = ("transformer_engine_torch*.so", "libtransformer_engine*.so")


def has_libraries(folder: Path) -> bool:
    """Whether Transformer Engine's compiled parts are in or next to the package in `folder`."""
    places = (folder, folder / NAME, folder / NAME / "wheel_lib")
    return any(any(place.glob(pattern)) for place in places for pattern in _LIBRARIES)


class Guard:
    """A finder that finds nothing, but raises ModuleNotFoundError for an incomplete Transformer Engine."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """Returns None, so that the other finders continue."""
        if name != NAME or path is not None:
            return
        for entry in map(Path, sys.path):
            if (entry / NAME / "__init__.py").is_file():
                if not has_libraries(entry):
                    raise ModuleNotFoundError(
                        f"{NAME} in {entry} has no CUDA parts: with mpbridge.transformer_engine_on_cpu() it runs without a GPU",
                        name=NAME,
                    )
                return


def install() -> None:
    """Inserts the guard before the other finders, once."""
    if not any(
        type(finder).__name__ == Guard.__name__ and type(finder).__module__ == __name__ for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, Guard())
