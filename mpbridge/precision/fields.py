"""What is said of a field of MixedPrecisionConfig besides its type, default and docstring: one row, given where the field is declared (`config.py`).

resolve, the checks of values, `inert`, show, tune and the docs read the rows; nobody else lists fields."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mpbridge.common.formats import DType

USUAL = (DType.FP32, DType.BF16, DType.FP16)
"""Legal values of a dtype field that names no others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRow:
    """One field."""

    legal: tuple[Any, ...] = ()
    """Legal values besides None: dtypes, or words; empty: every value of its type."""
    read_with: str = ""
    """The condition (a key of `inert.CONDITIONS`) without which the field is not read; empty: it always is."""
    usual: Any = None
    """megatron-core's own default, which Megatron-LM's arguments always include: without effect it means nothing."""
    fact: str = ""
    """The fact of PrecisionPolicy that is the value as it stands, a word as the dtype that it names; empty: resolve derives what it decides."""
    shown: str = ""
    """What `mpbridge show` calls the fact if it is stated; empty: it shows what it decides."""
    state: bool = False
    """Whether it decides what is stored, not what is computed: measurements of arithmetic leave it at its default."""
    fused: bool = False
    """Whether it is the dtype of a state that FusedAdam keeps: a narrow one makes the optimizer precision-aware."""


def option(default: Any, **row: Any) -> Any:
    """A field of the config with that default and row."""
    return dataclasses.field(default=default, metadata={"row": FieldRow(**row)})
