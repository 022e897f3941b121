"""The parts of a configuration that were not read: unknown keys, keys that are not about precision, and precision keys without effect here.

The names are the stack's own, at the version that its list was generated from (scripts/evidence/stacks/known_keys.py).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mpbridge.common.errors import cut, nearest
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks.base import Imported, updated_by
from mpbridge.interop.stacks.meaning import Meaning
from mpbridge.interop.stacks.optimizers import Trained
from mpbridge.interop.stacks.reading import MOST_SUGGESTED, Reader, in_force, raise_faults

PRECISION = re.compile(
    r"dtype|precision|fp(4|8|16|32)\b|fp(4|8|16|32)_|bf16|float(8|16|32)|mxfp8|nvfp4|autocast|quanti[sz]|loss_scale|amax|tf32|half_"
)
"""Pattern of names that concern precision."""
MANY = 6
"""Maximum number of lines of one kind; more are merged into one."""
EIGHT_BIT = re.compile(r"(adam|adagrad|ademamix|lion|lamb|lars|rmsprop|sgd)\w*8.?bit", re.IGNORECASE)
"""Optimizers with 8-bit moments (bitsandbytes, torchao), by their names in any stack."""
_OFF = (None, False, "", "no", "No", "none", "None", "null", "false")


@functools.cache
def known(stack: str) -> Mapping[str, frozenset[str]]:
    """section -> its known keys; '' is the top level. A section that is not listed takes what its `_target_` or its owner takes."""
    text = (Path(__file__).parent / "data" / "known_keys.json").read_text(encoding="utf-8")
    keys: Mapping[str, list[str]] = json.loads(text).get(stack, {}).get("keys", {})
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
