"""What stays and what goes when a run's recipe is replaced by another: which parameters train is the run's decision, all else is the recipe's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpbridge.common.errors import Contradiction, cut
from mpbridge.common.formats import say
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.registry import same_recipe

KEPT = ("frozen", "lora_dtype")
"""Fields that another recipe does not replace."""


def is_list(precision: Any) -> bool:
    """Whether a mixed_precision setting is a list of stages."""
    return isinstance(precision, Sequence) and not isinstance(precision, str)


def with_recipe(precision: Any, name: str) -> Any:
    """The mixed_precision setting with another recipe: {recipe: name} and what `kept` finds. Raises Contradiction."""
    return carried(name, kept(precision))


def kept(precision: Any, stated: Iterable[str] = ()) -> dict[str, Any]:
    """What a mixed_precision setting says of KEPT. stated: those that are not asked for.

    Raises Contradiction naming each of which the stages of a list say different things, since no single value would keep them."""
    parts = [_own(part) for part in (precision if is_list(precision) else [precision])]
    said = {name: [part.get(name) for part in parts] for name in KEPT if name not in stated}
    faults = [
        f"mixed_precision.{name} differs between the stages ({'; '.join(cut(say(value)) for value in values)}), and another recipe can keep only one: add mixed_precision.{name}=VALUE"
        for name, values in said.items()
        if any(value != values[0] for value in values)
    ]
    if faults:
        raise Contradiction(faults)
    return {name: values[0] for name, values in said.items() if values and values[0] is not None}


def carried(precision: Any, more: Mapping[str, Any]) -> Any:
    """A mixed_precision setting with `more`; of a list, each stage that does not say otherwise."""
    if is_list(precision):
        return [carried(part, more) for part in precision]
    if not more or not isinstance(precision, (str, Mapping)):
        return precision
    whole = {"recipe": precision} if isinstance(precision, str) else dict(precision)
    return whole | {name: value for name, value in more.items() if name not in whole}


def renames(precision: Any, below: Any) -> bool:
    """Whether `precision` names another recipe than the setting `below` it."""
    if not isinstance(precision, Mapping) or precision.get("recipe") is None:
        return False
    old = below.get("recipe") if isinstance(below, Mapping) else None
    return old is None or not same_recipe(str(old), str(precision["recipe"]))


def dropped(precision: Any, below: Any) -> list[str]:
    """The fields that go with the recipe `below`, to which their author had added them, as 'grad_reduce_in_fp32=false'; those of stages are the list's own."""
    again = precision if isinstance(precision, Mapping) else {}
    gone = [name for name in below if name not in (*KEPT, "recipe", *again)] if isinstance(below, Mapping) else []
    return [f"{name}={cut(say(below[name]))}" for name in gone]


def _own(part: Any) -> dict[str, Any]:
    said = part.as_data() if isinstance(part, MixedPrecisionConfig) else part
    found = {name: said[name] for name in KEPT if name in said} if isinstance(said, Mapping) else {}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
