"""A tuning's report on a terminal: what was moved and why, the proof next to that of simple rules, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpbridge.common.tables.units import size
from mpbridge.training.tune.arms import TUNED
from mpbridge.training.tune.evidence import fields, moved
from mpbridge.training.tune.tuning import AGREE, Tuned

PROOF = ("choice", "cost", "gradient error", "+-", "bias", "noise", "loss gap")
EXPLAINED = (
    "cost: {cost}. gradient error: ||g_q - g|| / ||g|| of a global batch, mean over the unseen batches, +- its standard error. bias: the part that is the same in every batch; "
    "noise: the rest, which averages out over batches. loss gap: nats per token above high precision."
)


def sections(result: Tuned, recipe: str) -> list[tuple[str, Sequence[str], list[Sequence[str]]]]:
    """(title, columns, rows) for each table."""
    return [
        ("what leaves the recipe's own format", ("linears", "layers", "to", "why"), list(moved(result))),
        (f"before and after, on {result.asked.unseen} unseen batches", PROOF, rows(result)),
    ]


def rows(result: Tuned) -> list[Sequence[str]]:
    """One row per arm."""
    memory = result.asked.budget.what == "memory"
    return [
        (
            name,
            f"{size(result.spent[name])}" if memory else f"{result.spent[name]:.3f}",
            f"{one.error:.4f}",
            f"{one.se:.4f}",
            f"{one.bias:.4f}",
            f"{one.noise:.4f}",
            f"{sum(one.gaps) / len(one.gaps):+.4f}",
        )
        for name, one in result.proof.items()
    ]


def lines(result: Tuned, recipe: str) -> list[str]:
    """The sentences below the tables; the verdict last."""
    asked = result.asked
    cost = "bytes of the fullest rank" if asked.budget.what == "memory" else f"over all low's; {asked.pricing.words()}"
    found = [EXPLAINED.format(cost=cost)]
    if math.isnan(result.agreement):
        agreement = "two halves of the batches have no rankings to compare: fewer than three decisions, or all equal"
    else:
        agreement = (
            f"two halves of the batches rank the decisions with a correlation of {result.agreement:.2f} (Spearman)"
        )
        agreement += f": below {AGREE}" if result.pooled else ""
    found.append(agreement + (", so layers were pooled to whole kinds" if result.pooled else ""))
    found.append(
        f"expected gradient error of the choice: {result.predicted:.4f}; measured: {result.proof[TUNED].error:.4f}"
    )
    found += [f"note: {note}" for note in result.notes]
    found += [f"verdict: {line}" for line in result.verdict.lines]
    if result.verdict.take != TUNED:
        said = fields(result.recipes[result.verdict.take], recipe)
        found.append(f"take: {said}")
    return found
