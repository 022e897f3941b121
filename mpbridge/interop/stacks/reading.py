"""Reads plain data of unknown origin: values by dotted path, dtypes in each stack's spelling; and says what was not read: unknown keys, keys that are not
about precision, and precision keys without effect here. The names are the stack's own, as scripts/evidence/stacks/known_keys.py collects them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from mpbridge.common.errors import BadValue, DataError, brief, cut, nearest
from mpbridge.common.files import shipped
from mpbridge.common.formats import DType, dtype, say
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks.base import Imported, updated_by
from mpbridge.interop.stacks.meaning import Meaning
from mpbridge.interop.stacks.optimizers import Trained

_ABSENT = object()
MOST_SUGGESTED = 20
"""Unknown names of a file that are said with the nearest known one: a comparison with all of them takes milliseconds."""
KINDS = ("inert", "contradicts", "cannot_express", "unknown", "undecided", "assumed")
"""Kinds of notes: fields of base.Imported."""
PRECISION = re.compile(
    r"dtype|precision|fp(4|8|16|32)\b|fp(4|8|16|32)_|bf16|float(8|16|32)|mxfp8|nvfp4|autocast|quanti[sz]|loss_scale|amax|tf32|half_"
)
"""Pattern of names that concern precision."""
MANY = 6
"""Maximum number of lines of one kind; more are merged into one."""
EIGHT_BIT = re.compile(r"(adam|adagrad|ademamix|lion|lamb|lars|rmsprop|sgd)\w*8.?bit", re.IGNORECASE)
"""Optimizers with 8-bit moments (bitsandbytes, torchao), by their names in any stack."""
_OFF = (None, False, "", "no", "No", "none", "None", "null", "false")


class Reader:
    """A tree of plain data that records which keys were read, and what is to be said of them."""

    def __init__(self, data: Mapping[str, Any], outer: Reader | None = None, under: str = "") -> None:
        """outer: a reader in whose data these stand `under` a path: faults, defaults and notes are its."""
        self.data = data
        self.asked, self.whole = set[str](), set[str]()
        """Paths that were read, and paths below which everything was read."""
        self.autos: list[tuple[str, str]] = outer.autos if outer else []
        """Values 'auto', and the assumed values."""
        self.faults: list[str] = outer.faults if outer else []
        self.silent: dict[str, str] = outer.silent if outer else {}
        """Paths of settings that were asked for and are not said -> the stack's own value, which decides then."""
        self.notes: dict[str, list[str]] = outer.notes if outer else {kind: [] for kind in KINDS}
        self.under: str = (outer.under if outer else "") + (f"{under}." if under else "")

    @classmethod
    def of(cls, data: Any, what: str) -> Reader:
        """A reader of a stack's file. Raises DataError for anything but a mapping."""
        if not isinstance(data, Mapping):
            raise DataError(f"{what} is a mapping, found {type(data).__name__}")
        return cls(data)

    def note(self, kind: str, text: str, when: Any = True) -> None:
        """Says something of the data, where it applies."""
        if when:
            self.notes[kind].append(text)

    def note_rows(self, *rows: tuple[str, Any, str]) -> None:
        """(kind, whether it applies, text) each."""
        for kind, applies, text in rows:
            self.note(kind, text, applies)

    def cannot(self, text: str, when: Any = True) -> None:
        """Says what mpbridge has no setting for."""
        self.note("cannot_express", text, when)

    def at(self, path: str, default: Any = None) -> Any:
        """The value at 'a.b.c'; keys that contain dots work too. Records a fault if something on the path is not a section."""
        value: Any = self.data
        self.asked.add(path)
        if path in self.data:
            return self.data[path]
        parts = path.split(".")
        for depth, part in enumerate(parts):
            if not isinstance(value, Mapping):
                fault = f"{'.'.join(parts[:depth])}={brief(value)}: expected a mapping"
                self.faults += [fault] if value is not None and fault not in self.faults else []
                return default
            if part not in value:
                return default
            value = value[part]
        return value

    def default(self, path: str, value: Any) -> None:
        """Notes what is in force where the data says nothing at a path."""
        self.silent.setdefault(self.under + path, "off" if value is False else "on" if value is True else say(value))

    def inner(self, data: Any, under: str) -> Reader:
        """A reader of a mapping that stands under a path of this one. Anything else is read as an empty one."""
        return Reader(data if isinstance(data, Mapping) else {}, self, under)

    def section(self, path: str) -> Mapping[str, Any]:
        """The mapping at a path; empty if there is none."""
        value = self.at(path)
        return value if isinstance(value, Mapping) else {}

    def flag(self, path: str, default: bool = False) -> bool:
        """A boolean, also as a word."""
        value = self.at(path)
        if value is None:
            self.default(path, default)
            return default
        if value == "auto":
            self.autos.append((self.under + path, "on" if default else "off"))
            return default
        word = value.strip().lower() if isinstance(value, str) else value
        for truth, words in ((True, _TRUE), (False, _FALSE)):
            if any(word == one and type(word) in (type(one), int, float) for one in words):
                return truth
        self.faults.append(f"{path}={brief(value)}: expected true or false")
        return default

    def text(self, path: str, default: str = "") -> str:
        """A word; records a fault if it is a list or a mapping."""
        value = self.at(path)
        if value is None and default:
            self.default(path, default)
        if isinstance(value, (list, tuple, Mapping)):
            self.faults.append(f"{path}={brief(value)}: expected a word")
            return default
        return default if value is None else str(value)

    def dtype(self, path: str, default: DType | None = None) -> DType | None:
        """A dtype in any spelling, including `{_target_: torch.bfloat16}`; records a fault if it is not one."""
        value = self.at(path)
        if isinstance(value, Mapping):
            self.whole.add(path)
            value = value.get("_target_")
        if value is None or value == "auto":
            if value is None and default is not None:
                self.default(path, default)
            return default
        try:
            return dtype(value)
        except BadValue as error:
            self.faults.append(f"{path}: {error}")
            return default

    def number(self, path: str, default: float, *, largest: float = 2.0**63) -> float:
        """A number of at most that magnitude; records a fault if it is not one."""
        value = self.at(path, _ABSENT)
        if value is _ABSENT:
            self.default(path, default)
            return default
        if value == "auto":
            self.autos.append((self.under + path, f"{default:g}"))
            return default
        try:
            found: float = value if isinstance(value, (int, float)) and not isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            self.faults.append(f"{path}={brief(value)}: expected a number")
            return default
        if -largest <= found <= largest:  # not for NaN either
            return found
        self.faults.append(f"{path}={brief(found)}: expected a number of at most {largest:g}")
        return default


def in_force(silent: Mapping[str, str], under: str = "") -> tuple[str, ...]:
    """What data leaves to a stack's defaults, a Reader's `silent`, as 'path=value' each, then in one line what is off. under: the section that the data is."""
    whole = {f"{under}.{path}" if under else path: value for path, value in silent.items()}
    off = ", ".join(path for path, value in whole.items() if value == "off")
    said = tuple(f"{path}={value}" for path, value in whole.items() if value != "off")
    return (*said, f"off: {off}") if off else said


def options_of(words: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """(option -> value, stray words) of `--name value`, `--name=value` and `--name`; dashes inside a name become underscores."""
    data: dict[str, Any] = {}
    strays: list[str] = []
    items = list(words)
    position = 0
    while position < len(items):
        word = items[position]
        position += 1
        if not word.startswith("--"):
            strays.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        following = items[position] if position < len(items) and not items[position].startswith("--") else None
        position += not equals and following is not None
        data[name.replace("-", "_")] = value if equals else True if following is None else following
    return data, strays


def stray(word: str, names: Iterable[str]) -> str:
    """The note about a stray word."""
    near = nearest(f"--{word.lstrip('-')}", names, most=1, cutoff=0.9)
    return f"{cut(word)} (a stray word{f'; nearest: {near[0]}' if near else ''})"


_TRUE = (True, 1, "true", "yes", "1", "on")
_FALSE = (False, 0, "false", "no", "0", "off", "none", "null", "")


def state_word(dtype: DType) -> str:
    """A state's dtype as recipes and both Megatrons say it: FP8 is kept in bytes."""
    return "fp8" if dtype is DType.UINT8 else dtype.short


def raise_faults(faults: list[str], what: str) -> None:
    """Raises one BadValue with every fault, if there are any."""
    if faults:
        raise BadValue("\n".join([f"{what} cannot be read:", *(f"  - {fault}" for fault in faults)]))


def base_field(compute: DType) -> dict[str, Any]:
    """The flag of MixedPrecisionConfig for a compute dtype."""
    return {{DType.BF16: "bf16", DType.FP16: "fp16"}.get(compute, "fp32"): True}


@functools.cache
def known(stack: str) -> Mapping[str, frozenset[str]]:
    """section -> its known keys; '' is the top level. A section that is not listed takes what its `_target_` or its owner takes."""
    keys: Mapping[str, list[str]] = shipped("interop/stacks/data/known_keys.json").get(stack, {}).get("keys", {})
    return MappingProxyType({section: frozenset(names) for section, names in keys.items()})


def imported(
    read: Reader, stack: str, version: str, meaning: Meaning, fields: Mapping[str, Any], *, engine: str = DEFAULT, optimizer: Any = None,
    where: str = "optimizer", momentum: Any = None, trained: Trained | None = None, under: str = "", own: str = "",
) -> Imported:  # fmt: skip
    """What was read: its meaning, the reader's notes, and the data that was not read: unknown keys with the nearest name, keys that are not about precision,
    and what is left open.

    optimizer: as the setting `where` names it. under: the section in `read`, if that is not a whole file. own: additional owner of keys that no list has (a
    script's own). Raises BadValue listing every value that could not be read.
    """
    raise_faults(read.faults, f"this configuration of {stack}")
    notes: dict[str, Any] = {kind: tuple(lines) for kind, lines in read.notes.items()}
    found = Imported(stack=stack, version=version, fields=fields, engine=engine, meaning=meaning, **notes)
    found = updated_by(found, optimizer, where, momentum=momentum, trained=trained)
    sections, low = known(stack), "8-bit moments are not modelled: the moments and bytes shown are those of full ones"
    unknown, other, open_, cannot = [*found.unknown], list[str](), list[str](), [*found.cannot_express]
    said = " ".join((*found.unknown, *found.inert, *found.cannot_express))
    for path, value in _leaves(read.data):
        place = cut(f"{under}.{path}" if under else path)
        if isinstance(value, str) and EIGHT_BIT.search(value):
            cannot.append(f"{cut(f'{path}={value}')}: {low}")
        if path in read.asked or any(path.startswith(f"{one}.") for one in read.whole):
            continue
        fault = _unknown(place, sections, suggest=len(unknown) < MOST_SUGGESTED)
        if fault is not None:
            if f"{place} " not in f"{said} " and f"{place}:" not in said:
                unknown.append(f"{fault}{own}" if own else fault)
        elif PRECISION.search(place) and value not in _OFF and place not in said:
            open_.append(f"{place}={cut(value)}: concerns precision, but decides nothing that is read here")
        else:
            other.append(place)
    if len(open_) > MANY:
        names = ", ".join(line.partition("=")[0] for line in open_)
        open_ = [f"{names}: concern precision, but decide nothing that is read here"]
    autos = {path: f"{path}=auto: filled in by the launcher (Trainer, accelerate)" for path, _ in read.autos}
    decide = [path for path, text in read.autos if PRECISION.search(path) and text in ("on", "off")]
    open_ += [f"{autos[path]}; assumed to be {text}" for path, text in read.autos if path not in decide]
    return dataclasses.replace(
        found, undecided=(*found.undecided, *(f"{autos[path]}: say true or false" for path in decide)), cannot_express=tuple(cannot),
        unknown=tuple(dict.fromkeys(unknown)), other=tuple(dict.fromkeys(other)), in_force=in_force(read.silent, under),
        assumed=tuple(dict.fromkeys((*found.assumed, *open_))),
    )  # fmt: skip


def unknown_of(stack: str, section: str, names: Iterable[str]) -> tuple[str, ...]:
    """Names unknown to a stack's section, with the nearest known ones."""
    faults = (_unknown(f"{section}.{name}", known(stack)) for name in names)
    return tuple(fault for fault in faults if fault is not None)


def _unknown(path: str, sections: Mapping[str, frozenset[str]], *, suggest: bool = True) -> str | None:
    """A key unknown to its section, with the nearest known one; None if it is known."""
    parts = path.split(".")
    for depth, part in enumerate(parts):
        section = ".".join(parts[:depth])
        names = sections.get(section, {part})
        if part not in names and not part.startswith("_"):
            near = nearest(part, names, most=1) if suggest else ()
            here, under = ".".join(parts[: depth + 1]), f"{section}." if section else ""
            return here + (f" (nearest: {under}{near[0]})" if near else "")
    return None


def _leaves(data: Mapping[str, Any], path: str = "", depth: int = 12) -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        here = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping) and value and depth:
            yield from _leaves(value, here, depth - 1)
        else:
            yield here, value
