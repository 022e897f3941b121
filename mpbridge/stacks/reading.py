"""Reading plain data of unknown origin: values by dotted path, dtypes in each stack's spelling, and which keys were used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpbridge.errors import BadValue, brief
from mpbridge.formats import DType, dtype


class Reader:
    """A tree of plain data that remembers which keys were asked for."""

    def __init__(self, data: Mapping[str, Any], faults: list[str] | None = None) -> None:
        self.data = data
        self.faults: list[str] = [] if faults is None else faults
        self.asked: set[str] = set()
        """Paths that were looked at."""
        self.whole: set[str] = set()
        """Paths of which everything below was looked at."""
        self.autos: list[tuple[str, str]] = []
        """Values 'auto', and what they were taken as."""

    def at(self, path: str, default: Any = None) -> Any:
        """The value at 'a.b.c'; keys that hold dots themselves work too."""
        value: Any = self.data
        self.asked.add(path)
        if path in self.data:
            return self.data[path]
        for part in path.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return value

    def section(self, path: str) -> Mapping[str, Any]:
        """The mapping at a path; empty where there is none or something else."""
        value = self.at(path)
        return value if isinstance(value, Mapping) else {}

    def flag(self, path: str, default: bool = False) -> bool:
        """A truth value, also written as a word."""
        value = self.at(path, default)
        if value == "auto":
            self.autos.append((path, "on" if default else "off"))
            return default
        if isinstance(value, str):
            return value.strip().lower() in ("true", "yes", "1", "on")
        return bool(value)

    def dtype(self, path: str, default: DType | None = None) -> DType | None:
        """A dtype in any spelling, `{_target_: torch.bfloat16}` included; a fault where it is none."""
        value = self.at(path)
        if isinstance(value, Mapping):
            self.whole.add(path)
            value = value.get("_target_")
        if value is None or value == "auto":
            return default
        try:
            return dtype(value)
        except BadValue as error:
            self.faults.append(f"{path}: {error}")
            return default

    def number(self, path: str, default: float) -> float:
        """A number; a fault where it is none."""
        value = self.at(path, default)
        if value == "auto":
            self.autos.append((path, f"{default:g}"))
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            try:
                return float(value)
            except (TypeError, ValueError):
                self.faults.append(f"{path}={brief(value)}: expected a number")
                return default
        return value


def raise_faults(faults: list[str], what: str) -> None:
    """One error with every fault. Raises BadValue."""
    if faults:
        raise BadValue("\n".join([f"{what} cannot be read:", *(f"  - {fault}" for fault in faults)]))


def base_field(compute: DType) -> dict[str, Any]:
    """The flag of MixedPrecisionConfig for a compute dtype."""
    return {{DType.BF16: "bf16", DType.FP16: "fp16"}.get(compute, "fp32"): True}
