"""Imports Transformer Engine's Python on top of our kernel module, and removes both from `sys.modules` again."""

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mpbridge.backend.devices import redirect
from mpbridge.common.errors import Refused
from mpbridge.common.transformer_engine import Package, folders
from mpbridge.te_cpu.module import NAME, make_module
from mpbridge.te_cpu.refusals import refusal, refused_name
from mpbridge.te_cpu.storages import forget_classes
from mpbridge.te_cpu.triton_parts import MODULES

_PACKAGE = "transformer_engine"
_ENVIRONMENT = {
    # keeps transformer_engine.common from loading CUDA libraries
    "NVTE_PROJECT_BUILDING": "1",
    "NVTE_FRAMEWORK": "pytorch",
    # its torch.compile fusions take seconds each on a CPU
    "NVTE_TORCH_COMPILE": "0",
    "TORCHDYNAMO_DISABLE": "1",
}
_loaded: dict[str, dict[str, types.ModuleType]] = {}
"""Version -> modules of a Transformer Engine that this process has imported, so that its classes stay the same when it is entered again."""


def ours(name: str) -> bool:
    """Whether a module name belongs to the packages loaded here."""
    return name in (NAME, _PACKAGE) or name.startswith(f"{_PACKAGE}.")


@contextmanager
def environment() -> Iterator[None]:
    """The variables that Transformer Engine reads while it is imported; variables that are already set are kept."""
    added = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    with restored(added):
        os.environ.update(added)
        yield


@contextmanager
def restored(names: Iterable[str]) -> Iterator[None]:
    """In the block these variables may be set or changed; afterwards they are as they were."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, old in before.items():
            os.environ.pop(name, None)
            if old is not None:
                os.environ[name] = old


class _Metadata:
    """Answers `importlib.metadata` with the version of the package that is loaded, wherever others lie on the path; finds no modules."""

    def __init__(self, package: Package) -> None:
        self.folder = str(package.folder)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        pass

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        name = getattr(context, "name", None)
        if name is None or name.replace("_", "-").lower() != "transformer-engine":
            return ()
        wanted = importlib.metadata.DistributionFinder.Context(name=name, path=[self.folder])
        return importlib.metadata.MetadataPathFinder.find_distributions(wanted)


@contextmanager
def loaded(package: Package) -> Iterator[types.ModuleType]:
    """Transformer Engine's package, importable in the block; afterwards `sys.modules` and `sys.path` are as they were."""
    kernels = sys.modules.get(NAME)
    if (kernels is not None or sys.modules.get(_PACKAGE) is not None) and not getattr(kernels, "mpbridge", False):
        raise Refused(
            "Transformer Engine is already imported: enter mpbridge.transformer_engine_on_cpu() before anything imports transformer_engine or megatron"
        )
    hidden = {name: module for name, module in sys.modules.items() if ours(name)}
    path, finder = list(sys.path), _Metadata(package)
    others = [name for name in _loaded if name != package.version]
    if others:
        raise Refused(
            f"Transformer Engine {others[0]} was already loaded in this process, and other modules keep its classes: {package.version} needs a separate process"
        )
    try:
        # last: whatever else lies there must not hide a checkout on PYTHONPATH
        sys.path += [place for place in map(str, (package.folder, *folders())) if place not in path]
        sys.meta_path.insert(0, finder)
        for name in hidden:
            del sys.modules[name]
        if package.version in _loaded:
            sys.modules.update(_loaded[package.version])
        else:
            forget_classes()
            _import(package)
        _forget_capabilities()
        yield sys.modules[_PACKAGE]
    finally:
        now = {name: module for name, module in sys.modules.items() if ours(name)}
        if getattr(now.get(NAME), "mpbridge", False) and hasattr(now.get(_PACKAGE), "__version__"):
            _loaded[package.version] = now
        for name in now:
            del sys.modules[name]
        sys.modules.update(hidden)
        sys.path[:] = path
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


def _import(package: Package) -> None:
    place = package.folder / _PACKAGE
    sys.modules[NAME] = make_module(package.release)
    for name, functions in {"": (), **MODULES}.items():
        full = f"{_PACKAGE}.pytorch.triton" + (f".{name}" if name else "")
        sys.modules[full] = _triton_module(full, functions)
    # common first, by itself: the package's __init__ imports pytorch, which loads the extension through it
    bare = types.ModuleType(_PACKAGE)
    bare.__path__ = [str(place)]
    sys.modules[_PACKAGE] = bare
    common: Any = importlib.import_module(f"{_PACKAGE}.common")
    common.load_framework_extension = lambda framework: None
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, place / "__init__.py", submodule_search_locations=[str(place)]
    )
    assert spec is not None  # the file exists: `packages` found it
    assert spec.loader is not None
    whole: Any = importlib.util.module_from_spec(spec)
    whole.common = common
    sys.modules[_PACKAGE] = whole
    spec.loader.exec_module(whole)
    if f"{_PACKAGE}.pytorch" not in sys.modules:
        # raises the actual error: the package's own __init__ hides an ImportError
        importlib.import_module(f"{_PACKAGE}.pytorch")
    _put_on_cpu()


def _put_on_cpu() -> None:
    """Makes the CPU Transformer Engine's default device, in every module that imported the function by name."""
    for name, module in list(sys.modules.items()):
        if not ours(name):
            continue
        if callable(vars(module).get("canonicalize_device")):
            vars(module)["canonicalize_device"] = _device
        own: Any = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == name]
        for kind in own:
            # from 2.20 on a copy that is not on "cuda" is moved there before it is read
            storage = name.startswith(f"{_PACKAGE}.pytorch.tensor.storage.") and kind.__name__.endswith("TensorStorage")
            if storage and "to" not in vars(kind):
                kind.to = _stay
            if name.startswith(f"{_PACKAGE}.pytorch.module.") and "__init__" in vars(kind):
                kind.__init__ = _no_index(kind.__init__)
    for name in (f"{_PACKAGE}.pytorch", f"{_PACKAGE}.pytorch.graph"):  # before it replaces the modules' __call__
        vars(sys.modules[name])["make_graphed_callables"] = refused_name(f"{_PACKAGE}.make_graphed_callables")
    grouped: Any = sys.modules.get(f"{_PACKAGE}.pytorch.module.grouped_linear")
    if hasattr(grouped, "is_module_grouped_tensor_path_supported"):
        grouped.GroupedLinear.forward = _splits_on_cuda(grouped.GroupedLinear.forward)


class _OnCuda(torch.Tensor):
    """A tensor that says it is on the played GPU; what is computed from it is plain."""

    device = property(lambda tensor: torch.device("cuda", 0))
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _splits_on_cuda(forward: Any) -> Any:
    """GroupedLinear's `forward` in which a tensor of its groups' sizes is on the GPU: its path for grouped tensors takes no other."""

    @functools.wraps(forward)
    def call(self: Any, inp: Any, m_splits: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(m_splits, torch.Tensor):
            m_splits = m_splits.to(torch.int64).as_subclass(_OnCuda)
        return forward(self, inp, m_splits, *args, **kwargs)

    return call


def _no_index(init: Any) -> Any:
    """A module's `__init__` in which `device` is never an index: megatron-core passes one, which torch cannot turn into a device without an accelerator."""
    signature = inspect.signature(init)
    if "device" not in signature.parameters:
        return init

    @functools.wraps(init)
    def call(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        if type(bound.arguments.get("device")) is int:
            bound.arguments["device"] = redirect.CPU
        init(*bound.args, **bound.kwargs)

    return call


def _stay(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`.to` of quantized storage: there is only one device."""
    return torch.Tensor.to(self, *args, **kwargs) if isinstance(self, torch.Tensor) else self


def _device(device: Any = None) -> torch.device:
    return redirect.CPU if device is None or redirect.names_cuda(device) else torch.device(device)


def _triton_module(name: str, functions: tuple[Any, ...]) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__path__ = []
    for function in functions:
        setattr(made, function.__name__, function)

    def missing(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return sys.modules.get(f"{name}.{attribute}") or refusal(attribute)

    made.__getattr__ = missing  # type: ignore[method-assign]
    return made


def _forget_capabilities() -> None:
    """Clears what Transformer Engine has cached about the machine: another one may be played now."""
    for value in [one for name, module in list(sys.modules.items()) if ours(name) for one in vars(module).values()]:
        if isinstance(value, functools._lru_cache_wrapper) and value.__module__.startswith(_PACKAGE):
            value.cache_clear()
    manager = sys.modules[f"{_PACKAGE}.pytorch.quantization"].FP8GlobalStateManager
    for attribute in list(vars(manager)):
        if attribute.endswith(("_available", "available")) and not callable(getattr(manager, attribute)):
            setattr(manager, attribute, None)
