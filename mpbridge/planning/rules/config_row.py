"""Shared by the rules about megatron-core's config classes: their sources, how a row is written and how its settings are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpbridge.planning.rules.base import Case, Rule

MODEL_CONFIG = "megatron-core 0.16.1 transformer_config.py __post_init__"
NEWER_MODEL_CONFIG = "Megatron-LM core/transformer/transformer_config.py (d98e8a64)"


def row(
    id: str, found: Callable[[Case], object], expected: str, cure: str, source: str = MODEL_CONFIG, **more: Any
) -> Rule:
    """A rule in one line."""
    return Rule(id=id, found=found, expected=expected, cure=cure, source=source, **more)


def listed(case: Case, name: str) -> tuple[str, ...]:
    """A model setting that is one word or a list of words, as a tuple; () if it is not set."""
    value = case.model(name, ())
    return tuple(str(item) for item in value) if isinstance(value, (list, tuple)) else (str(value),)


def latent(case: Case) -> bool:
    """Whether the model uses multi-latent attention."""
    return bool(case.model("multi_latent_attention"))
