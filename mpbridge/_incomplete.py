"""Keeps a Transformer Engine without its CUDA parts out of the way of everybody who asks whether there is one.

`mpbridge[te-cpu]` installs the pure-Python wheel `transformer-engine`, whose import dies of the missing libraries with a RuntimeError;
megatron-core expects an ImportError. Installed with `import mpbridge`; it looks at nothing before somebody imports transformer_engine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAME = "transformer_engine"
_LIBRARIES = ("transformer_engine_torch*.so", "libtransformer_engine*.so")


def has_libraries(folder: Path) -> bool:
    """Whether Transformer Engine's compiled parts lie in or beside the package in `folder`."""
    places = (folder, folder / NAME, folder / NAME / "wheel_lib")
    return any(any(place.glob(pattern)) for place in places for pattern in _LIBRARIES)


class Guard:
    """A finder that finds nothing; asked for an incomplete Transformer Engine it raises ModuleNotFoundError."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """None, so that the other finders go on."""
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
    """Puts the guard in front of the other finders, once."""
    if not any(
        type(finder).__name__ == Guard.__name__ and type(finder).__module__ == __name__ for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, Guard())
