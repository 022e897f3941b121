"""The fitted constants: read from data/step_time.json, which `scripts/evidence/fit_step_time.py` writes together with the rows they were fitted to; and a user's own machine, from the YAML file of `mpbridge calibrate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mpbridge.common.errors import BadValue
from mpbridge.common.files import shipped, text_of
from mpbridge.common.machines import Machine, machine

DATA = Path(__file__).with_name("data") / "step_time.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Multipliers on ideal times (1 / efficiency), and the fixed assumptions of the model."""

    shared: Mapping[str, float]
    """'gemm_mxfp8', 'attention', 'memory' ... -> multiplier; 'host' in milliseconds."""
    machines: Mapping[str, float]
    """Machine -> multiplier of its matrix products and attention; absent: 1, and a wider band."""
    alike: Mapping[str, str]
    """GEMM types without rows of their own -> types with the same speed ('gemm_delayed' -> 'gemm_tensorwise')."""
    spread: Mapping[str, float]
    """Machine with fitted rows -> relative error not exceeded by nine of ten of its rows whose model was left out of the fit on that machine."""
    releases: tuple[str, ...]
    """Minor releases of megatron-core with fitted rows."""
    bands: Mapping[str, float]
    """Further terms, each not exceeded in nine of ten cases: 'release not fitted', 'machine not fitted', 'architecture not fitted' (that of a whole band), 'unusual kernels' (upwards only)."""

    def of(self, name: str) -> float:
        """The shared multiplier of that name. Raises KeyError."""
        return self.shared[self.alike.get(name, name)]

    def machine(self, name: str) -> float:
        """The machine's multiplier."""
        return self.machines.get(name, 1.0)


@cache
def constants() -> Constants:
    """The shipped constants."""
    data = shipped("planning/estimate/data/step_time.json")
    return Constants(
        shared=MappingProxyType({name: row["value"] for name, row in data["shared"].items()}),
        machines=MappingProxyType({name: row["value"] for name, row in data["machines"].items()}),
        alike=MappingProxyType(data["alike"]),
        spread=MappingProxyType({name: row["band"] for name, row in data["machines"].items()}),
        releases=tuple(data["releases"]),
        bands=MappingProxyType(data["bands"]),
    )


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
    given = _numbers(path, data) | {"name": str(data.get("name") or base.name)}
    if "memory_bytes" in given:
        given["memory_source"] = "from the machine file"
    made = dataclasses.replace(base, peak=tuple({**dict(base.peak), **peak}.items()), **given)
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
        what = f"{error.strerror or error}, expected one that `mpbridge calibrate --out FILE` wrote"
        raise BadValue(f"machine file {path}: {what}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise BadValue(f"machine file {path} is not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(data, dict) or not isinstance(data.get("machine"), str) or not isinstance(data.get("peak"), dict):
        what = "the mapping that `mpbridge calibrate` writes, with machine and peak"
        raise BadValue(f"machine file {path}: expected {what}")
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
