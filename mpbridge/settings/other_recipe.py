"""What stays and what goes when a run's recipe is replaced by another: which parameters train is the run's decision, all else is the recipe's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpbridge.common.errors import Contradiction, MpbridgeError, cut
from mpbridge.common.formats import say
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.registry import get_mixed_precision_config, same_recipe

KEPT = ("frozen", "lora_dtype")
"""Fields that another recipe does not replace."""


def is_list(precision: Any) -> bool:
    """Whether a mixed_precision setting is a list of stages."""
    return isinstance(precision, Sequence) and not isinstance(precision, str)


def with_recipe(precision: Any, name: str) -> Any:
    """The mixed_precision setting with another recipe: {recipe: name} and what `kept` finds. Raises Contradiction."""
    return carried(name, kept(precision))


def said_of_kept(part: Any) -> dict[str, Any]:
    """What one stage says of KEPT, in its own fields or by its recipe. No function is called for it, since it may be a stranger's code."""
    said = part.as_data() if isinstance(part, MixedPrecisionConfig) else part
    said = {"recipe": said} if isinstance(said, (str, Path)) else said if isinstance(said, Mapping) else {}
    if said.get("recipe") is not None:
        with contextlib.suppress(MpbridgeError, OSError):  # the recipe's use says what is wrong with it
            said = {**get_mixed_precision_config(str(said["recipe"]), code=False).as_data(), **said}
    return {name: list(said[name]) if isinstance(said[name], tuple) else said[name] for name in KEPT if name in said}


def kept(precision: Any, stated: Iterable[str] = ()) -> dict[str, Any]:
    """What the stages of a mixed_precision setting say of KEPT. stated: fields that are not asked for.

    Raises Contradiction naming each of which the stages of a list say different things, since no single value would keep them."""
    parts = [said_of_kept(part) for part in (precision if is_list(precision) else [precision])]
    said = {name: [part.get(name) for part in parts] for name in KEPT if name not in stated}
    faults = [
        f"mixed_precision.{name} differs between the stages ({'; '.join(cut(say(value)) for value in values)}), and another recipe can keep only one: say it with the recipe, as in mixed_precision='{{recipe: NAME, {name}: VALUE}}'"
        for name, values in said.items()
        if any((value or None) != (values[0] or None) for value in values)  # [] freezes no more than nothing does
    ]
    if faults:
        raise Contradiction(faults, subject="the stages cannot be replaced by another recipe")
    return {name: value for name, values in said.items() for value in values if value is not None}


def carried(precision: Any, more: Mapping[str, Any]) -> Any:
    """A mixed_precision setting with `more`, of which each stage keeps what it says itself."""
    if is_list(precision):
        return [carried(part, more) for part in precision]
    if not more or not isinstance(precision, (str, Path, Mapping)):
        return precision
    said = said_of_kept(precision)
    new = {name: value for name, value in more.items() if name not in said}
    return (dict(precision) if isinstance(precision, Mapping) else {"recipe": precision}) | new if new else precision


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
