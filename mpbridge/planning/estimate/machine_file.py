"""A user's own machine, measured by `mpbridge calibrate` and read from its YAML file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mpbridge.common.errors import BadValue
from mpbridge.common.files import text_of
from mpbridge.common.machines import Machine, machine
from mpbridge.planning.estimate.constants import Constants, constants

_NUMBERS = ("memory_bytes", "bandwidth", "nvlink", "domain", "network", "multiprocessors", "clock")
FORMATS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
"""GEMM formats, as `Machine.flops` names them."""
LARGEST = 65536
"""Maximum size of a machine file in bytes; calibrate writes about one kilobyte."""


def read_machine(path: Path) -> tuple[Machine, Constants]:
    """(the machine, constants with measured values in place of fitted ones). Raises BadValue."""
    data = _mapping(path)
    base, held = machine(data["machine"]), constants()
    own = data.get("constants") or {}
    if not isinstance(own, dict):
        raise BadValue(f"machine file {path}: constants is {type(own).__name__}, expected a mapping")
    _known(path, "", data, {"machine", "name", "peak", "constants", "measured", *_NUMBERS})
    _known(path, "peak.", data["peak"], FORMATS)
    _known(path, "constants.", own, held.shared)
    peak = {str(name): _positive(path, f"peak.{name}", value) for name, value in data["peak"].items()}
    given = _numbers(path, data)
    made = dataclasses.replace(
        base,
        name=str(data.get("name") or base.name),
        peak=tuple({**dict(base.peak), **peak}.items()),
        memory_source="from the machine file" if "memory_bytes" in given else base.memory_source,
        **given,
    )
    shared = {**held.shared, **{name: _positive(path, f"constants.{name}", value) for name, value in own.items()}}
    return made, dataclasses.replace(held, shared=shared, machines={**held.machines, made.name: 1.0})


def _mapping(path: Path) -> dict[str, Any]:
    """The contents of the file, which has at least a machine and its peaks."""
    import yaml

    try:
        if path.stat().st_size > LARGEST:
            raise BadValue(f"machine file {path} has more than {LARGEST:,} bytes")
        data = yaml.safe_load(text_of(path))
    except OSError as error:
        raise BadValue(
            f"machine file {path}: {error.strerror or error}, expected one that `mpbridge calibrate --out FILE` wrote"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise BadValue(f"machine file {path} is not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(data, dict) or not isinstance(data.get("machine"), str) or not isinstance(data.get("peak"), dict):
        raise BadValue(
            f"machine file {path}: expected the mapping that `mpbridge calibrate` writes, with machine and peak"
        )
    return data


def _known(path: Path, section: str, given: Iterable[Any], known: Iterable[str]) -> None:
    strange = sorted(set(map(str, given)) - set(known))
    if strange:
        named = ", ".join(f"{section}{name}" for name in strange)
        raise BadValue(f"machine file {path}: unknown {named} (expected {', '.join(sorted(known))})")


def _numbers(path: Path, data: dict[str, Any]) -> dict[str, Any]:
    """The file's figures for the machine other than its peaks."""
    given: dict[str, Any] = {name: _positive(path, name, data[name]) for name in _NUMBERS if name in data}
    for whole in ("memory_bytes", "domain", "multiprocessors"):
        if whole in given:
            if given[whole] < 1:
                raise BadValue(f"machine file {path}: {whole}={given[whole]:g}, expected at least 1")
            given[whole] = int(given[whole])
    return given


def _positive(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise BadValue(f"machine file {path}: {name}={value!r}, expected a positive number")
    return float(value)
