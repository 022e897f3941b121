"""Reads pickles as data: a small interpreter that imports nothing, calls nothing and sets no attribute. Loads no framework.

Names are kept as names. What the caller allows may be called, which creates an `UnpickledCall`: a record of the name, the arguments and the state.
So a pickle can describe anything but execute nothing. Checkpoints allow listed names and refuse everything else; the arguments of a foreign checkpoint
allow every name, since they are only looked at (`any_call`). Time and memory are bounded by the number of opcodes, which is a limit of `files.LIMITS`."""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mpbridge.common.errors import CheckpointError
from mpbridge.common.files import LIMITS

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
"""First pickle of torch's pre-zip format (torch.serialization.MAGIC_NUMBER)."""


@dataclass(frozen=True, slots=True)
class Name:
    """A global that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False, repr=False)
class UnpickledCall:
    """Record of a call that is never executed."""

    name: Name
    args: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    """Items set on a mapping of that name."""

    def get(self, key: str) -> Any:
        """A field of the state; raises CheckpointError."""
        if not isinstance(self.state, dict) or key not in self.state:
            raise CheckpointError(f"a {self.name} without {key}")
        return self.state[key]


class _StackMark:
    """Marks the start of a group of stack items."""


_MARK = _StackMark()


class Budget:
    """What reading may cost, in opcodes and in the elements that they touch; pickles inside of one another share it."""

    def __init__(self, most: int = LIMITS["pickle"].steps) -> None:
        self.most = self.left = most

    def spend(self, cost: int) -> None:
        """Raises CheckpointError once nothing is left."""
        self.left -= cost
        if self.left < 0:
            raise CheckpointError(f"a pickle of more than {self.most} opcodes, or of values as many")


Call = Callable[[Name, tuple[Any, ...]], Any]
Storage = Callable[[Any], Any]


def any_call(name: Name, args: tuple[Any, ...]) -> UnpickledCall:
    """A record of any call: for pickles whose values are looked at by name."""
    return UnpickledCall(name, args)


def read(
    data: bytes, call: Call, storage: Storage | None = None, start: int = 0, *, budget: Budget | None = None
) -> tuple[Any, int]:
    """The value that a pickle in `data` describes, and the byte after its end.

    call: returns the value for a name and arguments (raises CheckpointError for an unknown name); storage: returns the value of a persistent id.
    budget: None: LIMITS' own. Raises CheckpointError for everything else."""
    try:
        return _Reader(call, storage, budget or Budget()).read(data, start)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, UnicodeError, OverflowError) as error:
        raise CheckpointError(f"a damaged pickle ({type(error).__name__}: {str(error)[:120]})") from error
    except RecursionError:
        raise CheckpointError("a pickle nested too deeply") from None


class _Reader:
    def __init__(self, call: Call, storage: Storage | None, budget: Budget) -> None:
        self.call, self.storage, self.budget = call, storage, budget
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def read(self, data: bytes, start: int) -> tuple[Any, int]:
        for opcode, argument, at in pickletools.genops(data[start:]):
            self.budget.spend(1)
            if opcode.name == "STOP":
                if self.stack[-1] is _MARK:
                    raise CheckpointError("a pickle that ends with a mark")
                return self.stack.pop(), start + int(at or 0) + 1
            if opcode.name in _VALUES:
                self.stack.append(argument)
            elif opcode.name in _CONSTANTS:
                self.stack.append(_CONSTANTS[opcode.name]())
            elif opcode.name in _ACTS:
                _ACTS[opcode.name](self, argument)
            elif opcode.name not in ("PROTO", "FRAME"):
                raise CheckpointError(f"a pickle with opcode {opcode.name}, which checkpoint writers never use")
        raise CheckpointError("a pickle without an end")

    def marked(self) -> list[Any]:
        if not any(item is _MARK for item in self.stack):
            raise CheckpointError("a pickle that collects items without a mark")
        at = len(self.stack) - 1 - next(n for n, item in enumerate(reversed(self.stack)) if item is _MARK)
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def put(self, argument: Any) -> None:
        self.memo[int(argument)] = self.stack[-1]

    def memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def get(self, argument: Any) -> None:
        self.stack.append(self.memo[int(argument)])

    def name(self, argument: Any) -> None:
        module, _, name = str(argument).partition(" ")
        self.stack.append(Name(module, name))

    def stack_name(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise CheckpointError("a name that is not text")
        self.stack.append(Name(module, name))

    def reduce(self, _: Any) -> None:
        args, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, Name) or not isinstance(args, tuple):
            raise CheckpointError("a call of something that is not a name")
        # a call may copy its arguments, of which a pickle can name one again and again
        self.budget.spend(sum(len(one) for one in args if isinstance(one, (list, tuple, dict))))
        self.stack.append(self.call(name, args))

    def reduce_with_keywords(self, _: Any) -> None:
        keywords = self.stack.pop()
        self.reduce(None)
        if isinstance(self.stack[-1], UnpickledCall) and isinstance(keywords, dict):
            self.stack[-1].items.update(keywords)

    def set_of(self, kind: str, items: tuple[Any, ...]) -> None:
        # a record as well: whether a set is plain data is the caller's word
        self.stack.append(self.call(Name("builtins", kind), (list(items),)))

    def add_items(self, _: Any) -> None:
        items, made = self.marked(), self.stack[-1]
        if not isinstance(made, UnpickledCall) or made.name != Name("builtins", "set"):
            raise CheckpointError("items added to something that is not a set")
        made.args[0].extend(items)

    def build(self, _: Any) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if not isinstance(made, UnpickledCall) or made.state is not None:
            what = made if isinstance(made, Name) else type(made).__name__
            raise CheckpointError(f"it sets attributes of {what}, which is not a record")
        made.state = state

    def persistent(self, _: Any) -> None:
        if self.storage is None:
            raise CheckpointError("a persistent id without storages")
        self.stack.append(self.storage(self.flat(self.stack.pop(), "persistent id")))

    def flat(self, value: Any, what: str) -> Any:
        """A key or id whose parts are few and not nested: hashing and printing it costs what is spent here."""
        self.budget.spend(_parts(value, what))
        return value

    def paired(self, items: list[Any]) -> dict[Any, Any]:
        return dict(zip((self.flat(key, "key") for key in items[::2]), items[1::2], strict=True))

    def append(self, _: Any) -> None:
        item = self.stack.pop()
        self._list().append(item)

    def appends(self, _: Any) -> None:
        items = self.marked()
        self._list().extend(items)

    def _list(self) -> list[Any]:
        if type(self.stack[-1]) is not list:
            raise CheckpointError("items added to something that is not a list")
        return self.stack[-1]

    def set_item(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._dict()[self.flat(key, "key")] = value

    def set_items(self, _: Any) -> None:
        items = self.marked()
        self._dict().update(self.paired(items))

    def _dict(self) -> dict[Any, Any]:
        top = self.stack[-1]
        if isinstance(top, UnpickledCall):
            return top.items
        if type(top) is not dict:
            raise CheckpointError("items set on something that is not a dict")
        return top

    def tuple(self, size: int) -> None:
        items = tuple(self.stack[len(self.stack) - size :])
        del self.stack[len(self.stack) - size :]
        self.stack.append(items)


_VALUES = frozenset(
    {
        "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE",
        "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8", "STRING", "BINSTRING", "SHORT_BINSTRING",
    }
)  # fmt: skip
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_DICT": dict,
    "MARK": lambda: _MARK,
}  # fmt: skip
_ACTS: dict[str, Callable[[_Reader, Any], Any]] = {
    "PUT": _Reader.put, "BINPUT": _Reader.put, "LONG_BINPUT": _Reader.put, "MEMOIZE": _Reader.memoize,
    "GET": _Reader.get, "BINGET": _Reader.get, "LONG_BINGET": _Reader.get,
    "GLOBAL": _Reader.name, "STACK_GLOBAL": _Reader.stack_name, "REDUCE": _Reader.reduce, "NEWOBJ": _Reader.reduce, "BUILD": _Reader.build,
    "BINPERSID": _Reader.persistent, "APPEND": _Reader.append, "APPENDS": _Reader.appends, "SETITEM": _Reader.set_item,
    "SETITEMS": _Reader.set_items, "POP": lambda self, _: self.stack.pop(), "POP_MARK": lambda self, _: self.marked(),
    "DUP": lambda self, _: self.stack.append(self.stack[-1]),
    "TUPLE": lambda self, _: self.stack.append(tuple(self.marked())), "TUPLE1": lambda self, _: self.tuple(1),
    "TUPLE2": lambda self, _: self.tuple(2), "TUPLE3": lambda self, _: self.tuple(3),
    "LIST": lambda self, _: self.stack.append(self.marked()),
    "DICT": lambda self, _: self.stack.append(self.paired(self.marked())),
    "NEWOBJ_EX": _Reader.reduce_with_keywords, "EMPTY_SET": lambda self, _: self.set_of("set", ()), "ADDITEMS": _Reader.add_items,
    "FROZENSET": lambda self, _: self.set_of("frozenset", tuple(self.marked())),
}  # fmt: skip

_SINGLE = (str, bytes, int, float, bool, type(None), Name, UnpickledCall)


def _parts(value: Any, what: str, depth: int = 2) -> int:
    """How many parts a name, a number, text, or a tuple of those, or of tuples of those, has. Raises CheckpointError for anything else: deeply nested
    shared tuples take forever to hash or to print."""
    if not (type(value) in _SINGLE or (type(value) is tuple and depth)):
        raise CheckpointError(f"a {what} that is a {type(value).__name__}, or tuples nested too deeply")
    return 1 + sum(_parts(part, what, depth - 1) for part in value) if type(value) is tuple else 1
