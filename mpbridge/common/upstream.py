"""Other packages as they are found: a Transformer Engine without its CUDA parts, megatron-core's warnings about itself, attributes replaced and restored.

Without its CUDA parts Transformer Engine looks uninstalled to code that checks for one: the extra te-cpu installs the pure-Python wheel `transformer-engine`, whose import fails with a RuntimeError because of the missing libraries;
megatron-core expects an ImportError. The guard is installed by `import mpbridge` and does nothing until transformer_engine is imported."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
                    cure = "with mpbridge.transformer_engine_on_cpu() it runs without a GPU"
                    raise ModuleNotFoundError(f"{NAME} in {entry} has no CUDA parts: {cure}", name=NAME)
                return


def install() -> None:
    """Inserts the guard before the other finders, once."""
    there = {(type(finder).__module__, type(finder).__name__) for finder in sys.meta_path}
    if (__name__, Guard.__name__) not in there:
        sys.meta_path.insert(0, Guard())


UPSTREAM = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "`torch.distributed.",  # names of collectives that torch 2.13 deprecates, and that megatron-core 0.16.1 calls
)
"""Beginnings of warnings that megatron-core emits at every import, construction or step; `doctor` reports what is not installed."""


def without_chatter() -> None:
    """Suppresses UPSTREAM in this process. Workers call it before they import megatron-core."""
    for text in UPSTREAM:
        warnings.filterwarnings("ignore", message=text)


Patch = tuple[Any, str, Any]
"""(owner, attribute, replacement)."""
MISSING = object()
"""In the place of an attribute that its owner did not have."""


class Replacement:
    """A set of attribute replacements, installed on the first entry and restored on the last exit, in any thread."""

    def __init__(self, patches: Callable[[], Iterable[Patch]]) -> None:
        self._patches = patches
        self._saved: list[tuple[Any, str, Any]] = []
        self.depth = 0

    def enter(self) -> None:
        """Installs them, unless they are."""
        self.depth += 1
        if self.depth > 1:
            return
        try:
            # all replacements are made before the first is installed: they wrap what they replace
            for owner, name, new in list(self._patches()):
                self._saved.append((owner, name, vars(owner).get(name, MISSING)))
                setattr(owner, name, new)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Restores everything at the last exit."""
        self.depth -= 1
        while self.depth == 0 and self._saved:
            owner, name, old = self._saved.pop()
            if old is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


@contextmanager
def replaced(*patches: Patch) -> Iterator[None]:
    """In the block those attributes are the replacements; afterwards they are as they were."""
    replacement = Replacement(lambda: patches)
    replacement.enter()
    try:
        yield
    finally:
        replacement.leave()
