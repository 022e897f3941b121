"""The `args` of a Megatron-LM checkpoint, read from the pickle's opcodes: no object is created, nothing is imported or run."""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from mpbridge.errors import DataError, brief

MOST_BYTES = 64 * 2**20
"""Maximum size of the pickle stream; arguments take kilobytes, and tensors are stored outside it."""
MOST_STEPS = 2_000_000
METADATA = ".metadata"
"""torch's table of a checkpoint: file, first byte and bytes of each tensor and object."""
LARGEST_TABLE, MOST_TABLE_STEPS = 2**30, 50_000_000
"""Of a thousand ranks' table: a tenth of that."""
_COMMON_STATE, _ARGS = "common_state/shard_0_1", "args"
"""Objects of such a table: what other versions put into common.pt (megatron-core 0.20's torch_dist), and the arguments alone (torch_dcp, fsdp_dtensor)."""


@dataclass(eq=False)  # a key of a dict stays what it is
class Named:
    """An object that a pickle would create by calling a name: kept as the name, its arguments and its state."""

    name: str
    arguments: Any = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)


class _GroupStart:
    """Marks the start of a group of values."""


def read_arguments(path: Path) -> Mapping[str, Any]:
    """Name -> value of the namespace stored under 'args', plain values only: dtypes as 'torch.bfloat16', enums as their value.

    path: `common.pt` of a distributed checkpoint, its `.metadata` where it has no such file, or `model_optim_rng.pt`. Raises DataError.
    """
    try:
        if path.name == METADATA:
            found = _beside(path)
        else:
            with path.open("rb") as file:
                found = _unpickled(file)
    except DataError as error:
        raise DataError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    except Exception as error:
        raise DataError(f"{path}: not a readable checkpoint: {type(error).__name__}: {error}") from None
    args = found.get("args") if isinstance(found, dict) else None
    state = args.state if isinstance(args, Named) else None
    if not isinstance(state, dict):
        raise DataError(f"{path} has no 'args': expected Megatron-LM's common.pt, .metadata or model_optim_rng.pt")
    return {str(name): _plain(value) for name, value in state.items() if isinstance(name, str)}


def arguments_file(folder: Path) -> Path:
    """The file in a checkpoint's folder that records how it was trained: in its root, in one iteration, or next to the shards. Raises DataError.

    Bridge's run_config.yaml where there is one; Megatron-LM's common.pt, mp_rank_*/model_optim_rng.pt or .metadata. In a root, of the iteration that
    latest_checkpointed_iteration.txt names.
    """
    latest = folder / "latest_checkpointed_iteration.txt"
    inside = folder
    if latest.is_file():
        text = latest.read_text(encoding="utf-8", errors="replace")[:40].strip()
        if text != "release" and not (text.isascii() and text.isdigit()):
            raise DataError(f"{latest} contains {brief(text)}, expected an iteration's number or 'release'")
        inside = folder / (text if text == "release" else f"iter_{int(text):07d}")
        if not inside.is_dir():
            raise DataError(f"{latest} names {text}, but {inside} does not exist")
    ranks = sorted(inside.glob("mp_rank_*/model_optim_rng.pt"))
    for file in (inside / "run_config.yaml", inside / "common.pt", *ranks[:1], inside / METADATA):
        if file.is_file():
            return file
    found = ", ".join(sorted(one.name for one in inside.iterdir())[:6]) or "nothing"
    raise DataError(
        f"{inside}: not a Megatron-LM or Bridge checkpoint: expected latest_checkpointed_iteration.txt, common.pt, .metadata, run_config.yaml"
        f" or mp_rank_*/model_optim_rng.pt, found {found}"
    )


def _beside(metadata: Path) -> Any:
    """What the file that holds the arguments, or everything that no rank shards, says of them: {'args': ...}. Found by torch's table."""
    with metadata.open("rb") as file:
        table = _run(_Bounded(file, LARGEST_TABLE), MOST_TABLE_STEPS)
    stored = _state(table, "storage_data")
    places = {_state(index, "fqn"): info for index, info in stored.items()} if isinstance(stored, dict) else {}
    key = next((key for key in (_COMMON_STATE, _ARGS) if key in places), None)
    if key is None:
        raise DataError("names neither an object 'common_state' nor 'args', where Megatron-LM keeps its arguments")
    name, start, size = (_state(places[key], field) for field in ("relative_path", "offset", "length"))
    if not isinstance(name, str) or "/" in name or not (metadata.parent / name).is_file():
        raise DataError(f"names no file beside it that holds the object {key}")
    if type(start) is not int or start < 0 or type(size) is not int or not 0 < size <= MOST_BYTES:
        raise DataError(f"gives the object {key} no place in {name}, or more than {MOST_BYTES} bytes of it")
    with (metadata.parent / name).open("rb") as file:
        file.seek(start)
        found = _unpickled(io.BytesIO(file.read(size)))
    if key == _ARGS:
        return {"args": found}
    return found[0] if isinstance(found, list) and found else found  # a list of the shards that a rank holds


def _state(value: Any, field: str) -> Any:
    """A field of what a pickle would have made; None where it has none."""
    return value.state.get(field) if isinstance(value, Named) and isinstance(value.state, dict) else None


def _unpickled(file: IO[bytes]) -> Any:
    """The object in a file of torch's, or in a plain pickle. Raises DataError for formats without arguments."""
    return _loaded(_Bounded(_pickle_in(file)))


_LEGACY = 0x1950A86A20F9469CFC6C
"""The magic number at the start of torch's pre-zip format; two more pickles precede the object."""


def _loaded(stream: _Bounded) -> Any:
    """The object in a file: the first pickle of a plain file, the fourth of torch's earlier format."""
    first = _run(stream)
    if first != _LEGACY:
        return first
    for _ in range(2):
        _run(stream)
    return _run(stream)


class _Bounded:
    """A file that is read no further than `most` bytes."""

    def __init__(self, file: IO[bytes], most: int = MOST_BYTES) -> None:
        self.file, self.most, self.left = file, most, most

    def read(self, size: int) -> bytes:
        return self._counted(self.file.read(min(size, self.left + 1)), size)

    def readline(self) -> bytes:
        return self._counted(self.file.readline(self.left + 1), 0)

    def _counted(self, data: bytes, wanted: int) -> bytes:
        self.left -= max(len(data), wanted if wanted > self.most else 0)
        if self.left < 0:
            raise DataError(f"its pickle is larger than {self.most} bytes, which no list of arguments is")
        return data


def _pickle_in(file: IO[bytes]) -> IO[bytes]:
    """The pickle of a file: inside torch's archive, or the file itself. Raises DataError for formats without arguments."""
    if not zipfile.is_zipfile(file):
        file.seek(0)
        start = file.read(512)
        file.seek(0)
        if start[257:262] == b"ustar":
            raise DataError("a tar archive (torch before 0.1.10): load and save it again with a later torch")
        if not start.startswith((b"\x80", b"(", b"}", b"c", b"]")):
            raise DataError(f"neither torch's archive nor a pickle: it begins with {start[:8]!r}")
        return file
    with zipfile.ZipFile(file) as archive:
        inside = [entry for entry in archive.infolist() if entry.filename.endswith("data.pkl")]
        if len(inside) != 1 or inside[0].file_size > MOST_BYTES:
            raise DataError(f"expected one data.pkl of at most {MOST_BYTES} bytes")
        return io.BytesIO(archive.read(inside[0]))


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


def _run(stream: _Bounded, most_steps: int = MOST_STEPS) -> Any:
    machine = _Machine()
    for steps, (opcode, argument, _) in enumerate(pickletools.genops(cast(IO[bytes], stream))):
        if steps > most_steps:
            raise DataError(f"the pickle has more than {most_steps} instructions")
        if opcode.name == "STOP":
            return machine.stack[-1]
        machine.step(opcode.name, argument)
    raise DataError("the pickle has no end")


class _Machine:
    """A pickle machine limited to plain data: anything that would call or import becomes a Named."""

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
            raise DataError(f"the pickle uses {name}, which a list of arguments never needs")

    def group(self) -> list[Any]:
        """Pops the values above the last mark, and the mark."""
        at = next(i for i in range(len(self.stack) - 1, -1, -1) if isinstance(self.stack[i], _GroupStart))
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def drop(self) -> None:
        """Drops the group."""
        self.group()

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        into = target.items if isinstance(target, Named) else target
        if isinstance(into, dict):
            for key, value in zip(items[::2], items[1::2], strict=True):
                into[key if isinstance(key, (str, int, float, tuple, Named)) else repr(key)] = value

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
    "POP_MARK": lambda m, _: m.drop(),
    "DUP": lambda m, _: m.stack.append(m.stack[-1]),
    "NEWOBJ_EX": lambda m, _: m.call((m.stack.pop(), m.stack.pop())[1]),
    "FROZENSET": lambda m, _: m.stack.append(m.group()),
    "POP": lambda m, _: m.stack.__delitem__(-1),
}
