"""The `args` of a Megatron-LM checkpoint, read from the pickle's opcodes: no object is made, no name is imported, nothing runs."""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpbridge.errors import DataError

MOST_BYTES = 64 * 2**20
"""Of the pickle stream; arguments take kilobytes, and tensors lie outside of it."""
MOST_STEPS = 2_000_000


@dataclass
class Named:
    """What a pickle would have made by calling a name: kept as the name, its arguments and its state."""

    name: str
    arguments: Any = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)


class _GroupStart:
    """Where a group of values begins."""


def read_arguments(path: Path) -> Mapping[str, Any]:
    """Name -> value of the namespace stored under 'args', plain values only: dtypes as 'torch.bfloat16', enums as their value.

    path: `common.pt` of a distributed checkpoint, or `model_optim_rng.pt`. Raises DataError.
    """
    try:
        found = _run(_stream(path))
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path}: not a checkpoint that can be read: {type(error).__name__}: {error}") from None
    args = found.get("args") if isinstance(found, dict) else None
    state = args.state if isinstance(args, Named) else None
    if not isinstance(state, dict):
        raise DataError(f"{path}: holds no 'args': expected Megatron-LM's common.pt or model_optim_rng.pt")
    return {str(name): _plain(value) for name, value in state.items() if isinstance(name, str)}


def _stream(path: Path) -> bytes:
    if not zipfile.is_zipfile(path):
        if path.stat().st_size > MOST_BYTES:
            raise DataError(f"{path}: larger than {MOST_BYTES} bytes without torch's archive around it")
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        inside = [entry for entry in archive.infolist() if entry.filename.endswith("data.pkl")]
        if len(inside) != 1 or inside[0].file_size > MOST_BYTES:
            raise DataError(f"{path}: expected one data.pkl of at most {MOST_BYTES} bytes")
        return archive.read(inside[0])


def _plain(value: Any) -> Any:
    if isinstance(value, Named):
        if (
            value.name == "torch.dtype"
            or value.name.startswith("torch ")
            or "." not in value.name.removeprefix("torch.")
        ):
            return value.name
        arguments = value.arguments if isinstance(value.arguments, tuple) else (value.arguments,)
        return arguments[0] if len(arguments) == 1 and isinstance(arguments[0], (str, int, float)) else value.name
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (type(None), bool, int, float, str)) else str(type(value).__name__)


def _run(stream: bytes) -> Any:
    machine = _Machine()
    for steps, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
        if steps > MOST_STEPS:
            raise DataError("the pickle has too many instructions for a list of arguments")
        if opcode.name == "STOP":
            return machine.stack[-1]
        machine.step(opcode.name, argument)
    raise DataError("the pickle has no end")


class _Machine:
    """A pickle machine that knows plain data and nothing else: whatever would call or import becomes a Named."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        action: Callable[[_Machine, Any], None] | None = _ACTIONS.get(name)
        if action is not None:
            action(self, argument)
        elif name in _PUSHES:
            self.stack.append(argument)
        elif name not in _NOTHING:
            raise DataError(f"the pickle uses {name}, which no list of arguments needs")

    def group(self) -> list[Any]:
        """The values above the last mark, which goes too."""
        at = next(i for i in range(len(self.stack) - 1, -1, -1) if isinstance(self.stack[i], _GroupStart))
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        into = target.items if isinstance(target, Named) else target
        if isinstance(into, dict):
            for key, value in zip(items[::2], items[1::2], strict=True):
                into[key if isinstance(key, (str, int, float, tuple)) else repr(key)] = value

    def call(self, arguments: Any) -> None:
        made = self.stack.pop()
        self.stack.append(Named(made.name if isinstance(made, Named) else "?", arguments))

    def build(self, state: Any) -> None:
        if isinstance(self.stack[-1], Named):
            self.stack[-1].state = state

    def extend(self, items: list[Any]) -> None:
        if isinstance(self.stack[-1], list):
            self.stack[-1].extend(items)


def _named(machine: _Machine, argument: Any) -> None:
    machine.stack.append(Named(".".join(str(argument).split(" "))))


def _stack_global(machine: _Machine, _: Any) -> None:
    attribute, module = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(Named(f"{module}.{attribute}"))


def _put(machine: _Machine, argument: Any) -> None:
    machine.memo[len(machine.memo) if argument is None else int(argument)] = machine.stack[-1]


def _reduce(machine: _Machine, _: Any) -> None:
    machine.call(machine.stack.pop())


def _tuple(size: int) -> Callable[[_Machine, Any], None]:
    def make(machine: _Machine, _: Any) -> None:
        items = tuple(machine.stack[-size:])
        del machine.stack[-size:]
        machine.stack.append(items)

    return make


def _dict(machine: _Machine, _: Any) -> None:
    items = machine.group()
    machine.stack.append({})
    machine.set_items(items)


def _push(value: Callable[[], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(value())


_PUSHES = frozenset(
    [
        "BININT",
        "BININT1",
        "BININT2",
        "INT",
        "LONG",
        "LONG1",
        "LONG4",
        "BINFLOAT",
        "FLOAT",
        "BINUNICODE",
        "BINUNICODE8",
        "SHORT_BINUNICODE",
        "UNICODE",
        "BINSTRING",
        "SHORT_BINSTRING",
        "STRING",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
    ]
)
_NOTHING = frozenset({"PROTO", "FRAME"})
_ACTIONS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "NONE": _push(lambda: None),
    "NEWTRUE": _push(lambda: True),
    "NEWFALSE": _push(lambda: False),
    "EMPTY_DICT": _push(dict),
    "EMPTY_LIST": _push(list),
    "EMPTY_SET": _push(list),
    "EMPTY_TUPLE": _push(tuple),
    "MARK": _push(_GroupStart),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "TUPLE": lambda m, _: m.stack.append(tuple(m.group())),
    "LIST": lambda m, _: m.stack.append(m.group()),
    "DICT": _dict,
    "APPEND": lambda m, _: m.extend([m.stack.pop()]),
    "APPENDS": lambda m, _: m.extend(m.group()),
    "ADDITEMS": lambda m, _: m.extend(m.group()),
    "SETITEM": lambda m, _: m.set_items([*reversed([m.stack.pop(), m.stack.pop()])]),
    "SETITEMS": lambda m, _: m.set_items(m.group()),
    "GLOBAL": _named,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "NEWOBJ": _reduce,
    "BUILD": lambda m, _: m.build(m.stack.pop()),
    "BINPERSID": lambda m, _: m.stack.append(Named("tensor storage", m.stack.pop())),
    "BINPUT": _put,
    "LONG_BINPUT": _put,
    "PUT": _put,
    "MEMOIZE": _put,
    "BINGET": lambda m, argument: m.stack.append(m.memo[int(argument)]),
    "LONG_BINGET": lambda m, argument: m.stack.append(m.memo[int(argument)]),
    "GET": lambda m, argument: m.stack.append(m.memo[int(argument)]),
    "POP": lambda m, _: m.stack.__delitem__(-1),
}
