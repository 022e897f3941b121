"""What a third-party CUDA-only script or test run needs besides Transformer Engine to run on a CPU.

It adjusts the environment and changes none of their files: a substitute for `triton`, which Megatron-LM imports unguarded; the
compiled index helper of the installed megatron-core, instead of building it in a source tree; Apex's fused weight gradient and LayerNorm; `typing.override` on
Python 3.11; spawned processes that play the same machine.
"""

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from mpbridge.common.errors import Refused
from mpbridge.common.probe import free_port
from mpbridge.common.upstream import replaced
from mpbridge.te_cpu.loading import restored
from mpbridge.te_cpu.module import make_apex
from mpbridge.te_cpu.played import now
from mpbridge.te_cpu.refusals import caller

# --- processes that a script starts by spawn ----------------------------------------------------------------------------------------------
VARIABLE = "MPBRIDGE_CHILD"
"""What a child process plays: the machine, the release, and the parent's main module by name or by path (JSON)."""


@contextlib.contextmanager
def _children_play() -> Iterator[None]:
    """In the block, processes started by spawn or forkserver also play what this one plays.

    Every process sees a real GPU; a played machine exists only in its own process, so a child's import of Transformer Engine would fail for
    lack of the compiled library. Therefore a child starts in `child`, plays what its parent plays, and continues with the parent's main module.
    """
    original = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        found, child = original(name), "mpbridge.te_cpu.child"
        if found.get("init_main_from_name") != child:  # a child's own, or that of a block around this one: it is told
            main = {key: found.pop(key) for key in ("init_main_from_name", "init_main_from_path") if key in found}
            os.environ[VARIABLE] = json.dumps({"machine": now().machine.name, "te": now().text, **main})
        return found | {"init_main_from_name": child}

    with restored([VARIABLE]), replaced((spawn, "get_preparation_data", get_preparation_data)):
        yield


# --- modules that are missing or not built ------------------------------------------------------------------------------------------------
_TRITON = (
    "triton", "triton.language", "triton.language.core", "triton.language.extra", "triton.language.extra.libdevice", "triton.language.math",
    "triton.language.standard", "triton.runtime", "triton.runtime.driver", "triton.runtime.jit", "triton.testing", "triton.tools",
    "triton.tools.tensor_descriptor",
)  # fmt: skip


class _Name:
    """Any name imported from triton while a module is defined: decorators, types, constants. Launching a kernel is refused."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Name(f"{self.name}.{attribute}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # a decorator, with or without arguments, turns the function into a kernel that cannot be launched, and so does one above another
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | _Kernel):
            return args[0] if isinstance(args[0], _Kernel) else _Kernel(args[0])
        return self

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return ()

    def __getitem__(self, other: Any) -> Any:
        return self

    __or__ = __ror__ = __getitem__

    def __lt__(self, other: Any) -> bool:
        return False

    def __ge__(self, other: Any) -> bool:
        return True


class _Kernel(_Name):
    """A Triton kernel."""

    def __init__(self, function: Any) -> None:
        super().__init__(getattr(function, "__qualname__", str(function)))
        self.fn = function

    @functools.cached_property
    def src(self) -> str:
        """Its source, from `def` on: xformers writes kernels from it when it is imported."""
        source = textwrap.dedent(inspect.getsource(self.fn))
        return source[source.index("def ") :]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Its launch, in whichever way."""
        raise Refused(f"the Triton kernel {self.name} runs on a GPU only (launched from {caller()})")

    warmup = __call__ = __getitem__ = run


class _Triton(types.ModuleType):
    __version__ = "3.2.0"

    # callers compute a launch with these: its refusal is what they are to see
    @staticmethod
    def cdiv(x: int, y: int) -> int:
        """x / y, rounded up."""
        return -(-x // y)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        """The smallest power of 2 that is not below n; 0 for 0."""
        return n and 1 << (n - 1).bit_length()

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if attribute == "JITFunction":
            return _Kernel  # a type, because torch calls isinstance with it
        return _Name(f"{self.__name__}.{attribute}")


def _stand_in_for_triton() -> list[types.ModuleType]:
    """The modules; none if triton is installed."""
    if importlib.util.find_spec("triton") is not None:
        return []
    # torch checks for triton once and caches the answer, which must be "no"
    utilities: Any = importlib.import_module("torch.utils._triton")
    for question in ("has_triton_package", "has_triton"):
        with contextlib.suppress(Exception):
            getattr(utilities, question)()
    with contextlib.suppress(Exception):
        importlib.import_module("torch._inductor.runtime.triton_compat")
    return [*map(_Triton, _TRITON)]


class _StandIns(importlib.abc.Loader):
    """Finds modules, given parents first, where nothing else is found: a package that is installed stays whole, and None in `sys.modules` closes one."""

    def __init__(self, made: Iterable[types.ModuleType]) -> None:
        self.made = {one.__name__: one for one in made}
        for name, one in self.made.items():
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(self.made[parent], child, one)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        parent = name.rpartition(".")[0]
        ours = name in self.made and sys.modules.get(parent) is self.made.get(parent)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return self.made[spec.name]

    def exec_module(self, module: Any) -> None:
        """Does nothing: the module is complete."""

    def forget(self) -> None:
        """Takes them, and nothing in their place, out of `sys.modules`."""
        for name, one in self.made.items():
            if sys.modules.get(name) is one:
                del sys.modules[name]


class _HelperFinder:
    """Finds megatron-core's compiled index helper in an installed megatron-core if the imported tree has not built its own."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "megatron.core.datasets.helpers_cpp":  # asked for every import: no folder is looked into before
            return None
        if any(list(Path(place).glob("helpers_cpp*.so")) for place in path or ()):
            return None
        for place in sys.path:
            for found in sorted(Path(place or ".").glob("megatron/core/datasets/helpers_cpp*.so")):
                if found.name.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)):
                    return importlib.util.spec_from_file_location(name, found)
        return None


class _UtilsFinder:
    """Makes `megatron.core.datasets.utils.compile_helpers` (make) a no-op: the helper above is used instead."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "megatron.core.datasets.utils":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            module.compile_helpers = lambda: None

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_MADE_UP = "MPBRIDGE_MASTER_PORT"
"""PROCESS:PORT if MASTER_PORT was not set by a launcher. A child process inherits both, but cannot listen on its parent's port."""


def _world_of_one(own_port: bool) -> dict[str, str]:
    """The variables of `_WORLD` to set so that a script starts without torchrun: those that are not set yet, and a free port.

    own_port: use a port other than the one that a parent process chose for itself.
    """
    maker, _, port = os.environ.get(_MADE_UP, "").partition(":")
    inherited = port == os.environ.get("MASTER_PORT") and maker != str(os.getpid())
    ours = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    made = {name: value for name, value in ours.items() if name not in os.environ}
    # one of several ranks keeps the port, since its parent set it deliberately
    if "MASTER_PORT" not in os.environ or (own_port and inherited and os.environ.get("WORLD_SIZE", "1") == "1"):
        made["MASTER_PORT"] = str(free_port())
        made[_MADE_UP] = f"{os.getpid()}:{made['MASTER_PORT']}"
    return made


@contextlib.contextmanager
def foreign_code(*, connections: bool = True, own_port: bool = True) -> Iterator[None]:
    """The environment for third-party code, restored afterwards.

    connections: CUDA_DEVICE_MAX_CONNECTIONS=1 too, which Megatron-LM's scripts require. own_port: this process is not part of its parent's world.
    """
    missing = _StandIns([*_stand_in_for_triton(), *make_apex()])
    finders: list[Any] = [_HelperFinder(), _UtilsFinder(), missing]
    sys.meta_path[:] = [*finders[:2], *sys.meta_path, missing]
    added = [] if hasattr(typing, "override") else [(typing, "override", lambda method: method)]
    try:
        with replaced(*added), restored((*_WORLD, _MADE_UP, "CUDA_DEVICE_MAX_CONNECTIONS")):
            os.environ.update(_world_of_one(own_port))
            if connections:
                os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
            with _children_play():
                yield
    finally:
        missing.forget()
        for finder in finders:
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
