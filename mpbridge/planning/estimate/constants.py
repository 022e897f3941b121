"""The fitted constants: read from data/step_time.json, which `scripts/evidence/fit_step_time.py` writes together with the rows they were fitted to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

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
    data = json.loads(DATA.read_text(encoding="utf-8"))
    return Constants(
        shared=MappingProxyType({name: row["value"] for name, row in data["shared"].items()}),
        machines=MappingProxyType({name: row["value"] for name, row in data["machines"].items()}),
        alike=MappingProxyType(data["alike"]),
        spread=MappingProxyType({name: row["band"] for name, row in data["machines"].items()}),
        releases=tuple(data["releases"]),
        bands=MappingProxyType(data["bands"]),
    )
