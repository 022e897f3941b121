"""CUDA's autocast on a CPU: torch's CPU autocast has other lists of operations in 16 bits, in FP32 and in the widest dtype of their inputs.

Source: the lists in ATen/autocast_mode.h, which every torch release ships.
"""

import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.amp import autocast_mode

from mpbridge.common.errors import BadValue
from mpbridge.common.files import text_of
from mpbridge.common.upstream import Patch

_HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_CPUS_OWN = frozenset({"mkldnn_rnn_layer", "_native_multi_head_attention"})
"""In 16 bits, as cuDNN's and the Transformer encoder's are on CUDA under other names."""

_BANNED = "binary_cross_entropy"


def off() -> Any:
    """A context in which operations run in the dtypes of their inputs, as inside of a compiled kernel."""
    return torch._C._ExcludeDispatchKeyGuard(_KEYS)


@functools.cache
def lists() -> Mapping[str, tuple[str, ...]]:
    """Policy -> operations ('softmax.int') that CUDA's autocast runs by it. Raises BadValue if this torch's header cannot be read."""
    try:
        text = text_of(_HEADER)
    except OSError as error:
        raise BadValue(f"{_HEADER}: {error.strerror}; the operations of CUDA's autocast are listed there") from error
    macros = dict(re.findall(r"#define AT_FORALL_(\w+)\(_\)((?:.*\\\n)*.*)", text))
    of = {"low": "LOWER_PRECISION_FP", "fp32": "FP32", "opt_dtype": "FP32_SET_OPT_DTYPE", "widest": "PROMOTE"}
    found = {policy: re.findall(r"\b_\((\w+(?:, \w+)?)\)", macros[macro]) for policy, macro in of.items()}
    listed = {policy: tuple(name.replace(", ", ".") for name in names) for policy, names in found.items()}
    return listed | {"append_dtype": ("norm.Scalar", "norm.ScalarOpt_dim")}


def _eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(one, dtype) for one in value)
    return value.to(dtype) if _eligible(value) else value


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        yield from _flat(value) if isinstance(value, (list, tuple)) else (value,)


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _kernel(policy: str, op: Any) -> Callable[..., Any]:
    """An operation under CUDA's autocast."""
    names = [argument.name for argument in op._schema.arguments]

    def call(*args: Any, **kwargs: Any) -> Any:
        given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
        with off():
            if policy == "rounded":
                made = op(**{name: _cast(value, torch.float32) for name, value in given.items()})
                return _cast(made, args[0].dtype) if _eligible(args[0]) else made
            if policy == "opt_dtype":
                if _eligible(args[0]) and given.get("dtype") is None:
                    given["dtype"] = torch.float32
                return op(**given)
            if policy == "append_dtype":
                dtype = torch.float32 if _eligible(args[0]) else args[0].dtype
                if op._overloadname == "Scalar":
                    return torch.norm(args[0], given.get("p", 2), dtype=dtype)
                return torch.norm(args[0], given["p"], given["dim"], given.get("keepdim", False), dtype=dtype)
            to = torch.float32 if policy == "fp32" else torch.get_autocast_dtype("cpu")
            if policy == "widest" and any(_eligible(x) and x.dtype is torch.float32 for x in _flat(given.values())):
                to = torch.float32
            return op(**{name: _cast(value, to) for name, value in given.items()})

    return call


def _banned(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"{_BANNED} is refused by CUDA's autocast, because its gradient overflows in 16 bits: use binary_cross_entropy_with_logits"
    )


@contextmanager
def cuda_lists() -> Iterator[None]:
    """In the block, autocast on the CPU treats each operation as CUDA's does."""
    make: Any = torch.library.Library
    library = make("aten", "IMPL", "AutocastCPU")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some kernels are replaced on purpose
            here = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
            has = {name.removeprefix("aten::") for name in here if name.startswith("aten::")}
            known = {name for names in lists().values() for name in names}
            for policy, names in lists().items():
                for name in set(names) - has:
                    library.impl(name, _kernel(policy, _op(name)))
            for name in has - known - _CPUS_OWN - {_BANNED}:  # torch's CPU had that one in its lists until 2.6
                # in the dtype of its input; of pools and paddings, the CPU has not all in 16 bits
                pools = re.search("pool|pad[123]", name)
                library.impl(name, _kernel("rounded", _op(name)) if pools else torch.library.fallthrough_kernel)
            library.impl(_BANNED, _banned)
        yield
    finally:
        library._destroy()


def patches() -> Iterator[Patch]:
    """`torch.autocast`, under whichever of its names: that of CUDA is the CPU's too, and code that asks for either gets the answer of a GPU."""
    enter, leave, cast = autocast_mode.autocast.__enter__, autocast_mode.autocast.__exit__, autocast_mode._cast

    def entered(self: Any) -> Any:
        found = enter(self)  # type: ignore[no-untyped-call]
        if self.device == "cuda":
            self._cpus = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
            torch.set_autocast_enabled("cpu", self._enabled)
            torch.set_autocast_dtype("cpu", self.fast_dtype)
        return found

    def left(self: Any, *error: Any) -> Any:
        if self.device == "cuda":
            torch.set_autocast_enabled("cpu", self._cpus[0])
            torch.set_autocast_dtype("cpu", self._cpus[1])
        return leave(self, *error)

    yield autocast_mode.autocast, "__enter__", entered
    yield autocast_mode.autocast, "__exit__", left
    # custom_fwd's casts
    yield autocast_mode, "_cast", lambda value, device, dtype: cast(value, "cpu" if device == "cuda" else device, dtype)
