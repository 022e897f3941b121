"""The registered recipe that is nearest to what was observed, and where it differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpbridge.common.errors import MpbridgeError
from mpbridge.common.traits import DEFAULT, engine_names, traits
from mpbridge.interop.stacks.meaning import LABELS, LAYOUT, of_policy, rows
from mpbridge.observe.witnessing.describe import Description
from mpbridge.precision.registry import get_mixed_precision_config, recipes
from mpbridge.precision.resolve import resolve
from mpbridge.precision.wording import rule_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """A recipe compared with what was seen."""

    recipe: str
    differences: Mapping[str, tuple[str, str]]
    """Row -> (the recipe's, what was seen)."""
    other_master: bool = False
    """Whether updates are added to weights of another dtype: then storage and main weights are not just a matter of layout."""

    @property
    def arithmetic(self) -> tuple[str, ...]:
        """Rows that change the arithmetic, not only the layout."""
        layout = tuple(row for row in LAYOUT if not (self.other_master and row in ("storage", "main")))
        return tuple(row for row in self.differences if row not in layout)

    def __str__(self) -> str:
        if not self.differences:
            return f"{self.recipe}, exactly"
        kind = "same arithmetic, different layout" if not self.arithmetic else "different arithmetic"
        changes = "; ".join(f"{LABELS[row]}: {seen}, not {ours}" for row, (ours, seen) in self.differences.items())
        return f"{self.recipe} except for ({kind}) {changes}"

    def as_data(self) -> dict[str, Any]:
        """The comparison as JSON types."""
        return {
            "recipe": self.recipe,
            "differences": {row: {"recipe": ours, "seen": seen} for row, (ours, seen) in self.differences.items()},
        }


def nearest(description: Description, *, layers: int) -> Nearest | None:
    """The recipe with the fewest rows of different arithmetic, then of different layout, then first in the registry; None when no recipe can be read."""
    found = [
        one
        for name in recipes
        for engine in dict.fromkeys((recipes[name].engine or DEFAULT, *_engines(description)))
        if (one := _compared(name, engine, description, layers)) is not None
    ]
    return min(found, key=lambda one: (len(one.arithmetic), len(one.differences)), default=None)


def _engines(description: Description) -> tuple[str, ...]:
    """mpbridge's engines with the same layout as this loop; a recipe is compared on each of them."""
    return (
        tuple(name for name in engine_names() if traits(name).shards >= {"params", "grads"})
        if (description.meaning.sharded == "everything")
        else ()
    )


def _compared(name: str, engine: str, description: Description, layers: int) -> Nearest | None:
    try:
        policy = resolve(get_mixed_precision_config(name))
        ours = of_policy(policy, engine=engine, sharded=description.meaning.sharded)
    except MpbridgeError:  # a third-party recipe that does not load
        return None
    mine, theirs = rows(ours), rows(description.meaning)
    skipped = {*description.unseen, "quantization", "loss_scale", "sharded"}
    found = {row: (mine[row], theirs[row]) for row in LABELS if row not in skipped and mine[row] != theirs[row]}
    if (ours.loss_scale is None) is not (description.meaning.loss_scale is None):
        found["loss_scale"] = mine["loss_scale"], theirs["loss_scale"]
    other = sum(rule_words(policy.of_path(path, layers)) != rule for path, rule in description.paths.items())
    if other:
        found["quantization"] = mine["quantization"], f"{description.rows()['quantization']} ({other} linears differ)"
    other_master = "main" not in skipped and ours.master is not description.meaning.master
    return Nearest(recipe=name, differences=found, other_master=other_master)
