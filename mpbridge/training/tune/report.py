"""A tuned recipe: the content of its file with the evidence, and the report on a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mpbridge.common import files
from mpbridge.common.errors import BadValue
from mpbridge.common.shipped import VERSION
from mpbridge.common.tables import size
from mpbridge.planning.rules.gemm_shapes import spans
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.registry import get_mixed_precision_config, recipes
from mpbridge.settings.load import dump_yaml
from mpbridge.training.tune.choices import LOW, TUNED
from mpbridge.training.tune.tuning import AGREE, Tuned


def evidence(result: Tuned, *, recipe: str, facts: dict[str, Any], library: str | None = None) -> dict[str, Any]:
    """The file's content: the recipe that it extends, what differs, and the evidence. recipe: a name, or any other text for a config written in full.
    library: the library of the model, with its version."""
    asked = result.asked
    said = {
        "found by": ", ".join(filter(None, (f"mpbridge {VERSION} tune, torch {torch.__version__}", library))),
        **facts,
        "batches": {"scored": asked.batches, "unseen": asked.unseen},
        "budget": str(asked.budget),
        "cost": asked.pricing.words()
        if asked.budget.what != "memory"
        else f"bytes of the fullest rank on {asked.pricing.machine.name}",
        "agreement of two halves": None if math.isnan(result.agreement) else _short(result.agreement),
        "decisions": "whole kinds (the halves disagree about layers)" if result.pooled else "each unit",
        "scores": scores(result),
        "expected gradient error": _short(result.predicted),
        "proof": {
            name: {**{key: _short(value) for key, value in one.as_data().items()}, "cost": _short(result.spent[name])}
            for name, one in result.proof.items()
        },
        "verdict": list(result.verdict.lines),
        "take": result.verdict.take,
        "notes": list(result.notes),
    }
    return {
        **fields(result.recipes[TUNED], recipe),
        "evidence": {name: value for name, value in said.items() if value not in (None, [])},
    }


def fields(config: MixedPrecisionConfig, recipe: str) -> dict[str, Any]:
    """`config` as a recipe file states it: the recipe that it extends, and what differs from it."""
    if recipe not in recipes or recipes[recipe].foreign:
        return config.as_data()
    base, data = get_mixed_precision_config(recipe).stored(), config.as_data()
    changed = {name: data.get(name) for name, value in config.stored().items() if value != base[name]}
    return {"extends": recipe, **changed}


def scores(result: Tuned) -> dict[str, dict[str, Any]]:
    """Kind -> level -> expected share of the squared gradient error by layer ({layer: damage} in order)."""
    found: dict[str, dict[str, Any]] = {}
    for unit, mine in zip(result.units, result.options, strict=True):
        for level, value in mine.items():
            if value:
                found.setdefault(unit.kind, {}).setdefault(level, {})[unit.layer] = _short(value)
    return found


def write(path: Path, content: dict[str, Any]) -> None:
    """The recipe file. Raises BadValue if it cannot be written."""
    try:
        files.write(path, dump_yaml(content))
    except OSError as error:
        raise BadValue(
            f"--out {path}: {error.strerror or error} (expected a file name in an existing folder)"
        ) from None


def moved(result: Tuned) -> list[tuple[str, str, str, str]]:
    """(linears, layers, level, why) of everything that was moved to another format, most damaging first."""
    whole = sum(mine.get(LOW, 0.0) for mine in result.options)
    rows: dict[tuple[str, str], tuple[list[int], float]] = {}
    for unit, mine in zip(result.units, result.options, strict=True):
        level = result.choice[unit.name]
        if level == LOW:
            continue
        layers, saved = rows.setdefault((unit.kind, level), ([], 0.0))
        layers.extend(dict.fromkeys(layer for layer, _ in unit.places))
        rows[unit.kind, level] = (layers, saved + mine.get(LOW, 0.0) - mine[level])
    order = sorted(rows.items(), key=lambda item: -item[1][1])
    return [
        (
            kind,
            spans(layers),
            level,
            f"{saved / whole:.0%} of all low's damage" if saved > 0 else "its shapes do not fit the low format",
        )
        for (kind, level), (layers, saved) in order
    ]


def _short(value: float) -> float:
    return float(f"{value:.4g}")


PROOF = ("choice", "cost", "gradient error", "+-", "bias", "noise", "loss gap")
EXPLAINED = (
    "cost: {cost}. gradient error: ||g_q - g|| / ||g|| of a global batch, mean over the unseen batches, +- its standard error. bias: the part that is the same in every batch; "
    "noise: the rest, which averages out over batches. loss gap: nats per token above high precision."
)


def sections(result: Tuned) -> list[tuple[str, Sequence[str], list[Sequence[str]]]]:
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
