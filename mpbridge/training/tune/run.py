"""Tuning from beginning to end: the model of a configuration (on megatron-core, on this machine, from a checkpoint's weights or from scratch), or any module with a loss, which needs
no megatron-core; the content of a tuned recipe's file with the evidence, and the report on a terminal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mpbridge.common import files
from mpbridge.common.errors import BadValue, Refused
from mpbridge.common.probe import installed
from mpbridge.common.shipped import VERSION
from mpbridge.common.tables import processes, size
from mpbridge.numerics import Emulation, emulate_linears
from mpbridge.numerics.modules import refuse_without_linears
from mpbridge.planning.rules.gemm_shapes import spans
from mpbridge.precision.config import MixedPrecisionConfig, plain_states
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.registry import FOREIGN, get_mixed_precision_config, recipes
from mpbridge.settings.container import ConfigContainer, Run
from mpbridge.settings.load import dump_yaml
from mpbridge.settings.training import microbatches
from mpbridge.training.checkpoint import store
from mpbridge.training.tune.choices import LOW, TUNED
from mpbridge.training.tune.levels import Budget, Pricing, Where, aimed, budget_of, expressible, prepared
from mpbridge.training.tune.proof import EngineSubject, ModuleSubject
from mpbridge.training.tune.tuning import AGREE, ENOUGH, FEWEST, Tuned, TuningRequest, refuse_bad, tuned


def tune(
    container: ConfigContainer,
    *,
    levels: Sequence[str] | None = None,
    budget: Budget | None = None,
    batches: int = 8,
    unseen: int = 4,
    where: Where | None = None,
    say: Callable[[str], None] = print,
) -> tuple[Tuned, dict[str, Any]]:
    """Which linears of `container`'s model can run in low precision under its recipe: the result, and its record for a recipe file.

    The weights come from checkpoint.load. batches: global batches to score; unseen: global batches of the validation split for the proof. Nothing is
    trained and nothing of the run is written. Raises Refused for a recipe or level that cannot be tuned, BadValue for invalid budgets and numbers,
    CheckpointError, DataError. Every rank calls it.
    """
    from mpbridge.training.process import process_group

    refuse_bad(batches, unseen)
    where = where or Where()
    with process_group(torch.cuda.is_available()):
        world = dist.get_world_size()
        run = container.resolved(world, training=False)
        if len(run.stages) > 1:
            say(f"only the first of {len(run.stages)} recipes is tuned, {run.recipe} (--recipe tunes another)")
        config = run.stages[0].config
        base, policy = prepared(config)
        found, left_out = aimed(config, levels, where)
        target = where.priced(policy)
        priced = container.resolved(world, machine=target, versions=where.versions, training=False).facts
        there = priced if where.machine else None
        found, notes = expressible(found, base, run=there, stack=where.stack, asked=levels is not None)
        asked = TuningRequest(
            config=config,
            levels=found,
            budget=budget or Budget(),
            batches=batches,
            unseen=unseen,
            pricing=Pricing(machine=target, constants=where.constants),
            run=dataclasses.replace(priced, machine=target),
            seed=run.train["seed"],
            notes=(*left_out, *notes),
        )
        with opened(container, base, batches=batches, unseen=unseen) as (subject, weights):
            result = tuned(subject, asked, say)
        library = f"megatron-core {installed().megatron_core}"
        return result, evidence(result, recipe=run.recipe, facts=_facts(run, weights, where), library=library)


@contextmanager
def opened(
    container: ConfigContainer, config: MixedPrecisionConfig, *, batches: int, unseen: int
) -> Iterator[tuple[EngineSubject, Path | None]]:
    """(the container's model under `config`, emulated; the checkpoint of its weights). Requires a process group."""
    from mpbridge.training.data.batches import Feed
    from mpbridge.training.process import bare, data_parallel, with_weights

    given = dict(container.checkpoint).get("load")
    weights = store.locate(Path(given)) if given else None
    made = bare(container)
    made.mixed_precision = config.derive(**plain_states())
    for name, value in {"train_iters": batches, "eval_interval": 1, "eval_iters": unseen, "audit": "warn"}.items():
        setattr(made.train, name, value)
    run = made.resolved(dist.get_world_size())
    with with_weights(run, weights, cuda=torch.cuda.is_available()) as engine:
        rank, ranks = data_parallel()
        subject = EngineSubject(engine, Feed(run), microbatches=microbatches(run.train, ranks), rank=rank, ranks=ranks)
        yield subject, weights


def _facts(run: Run, weights: Path | None, where: Where) -> dict[str, Any]:
    shape = run.facts.shape
    target = [name for name in (where.stack, where.machine.name if where.machine else None) if name]
    return {
        **({"for": " on ".join(target)} if target else {}),
        "model": f"{shape.num_layers} layers of width {shape.hidden_size}"
        + (f", {shape.experts} experts" if shape.experts else ""),
        "checkpoint": str(weights) if weights is not None else "none: randomly initialized weights",
        "data": run.data["corpus"] if isinstance(run.data["corpus"], str) else list(map(str, run.data["corpus"])),
        "batch": f"{run.train['global_batch_size']} sequences of {shape.seq_length} tokens",
        "layout": processes(run.world_size),
        "seed": run.train.get("seed"),
    }


Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


def tune_module(
    module: torch.nn.Module,
    step: Loss,
    batches: Sequence[Any],
    recipe: str | Path | MixedPrecisionConfig,
    *,
    levels: Sequence[str] | None = None,
    budget: Budget | str | None = None,
    unseen: int = 4,
    where: Where | None = None,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> tuple[Tuned, dict[str, Any]]:
    """Which of `module`'s linears can run in low precision under `recipe`: the result, and the content of a recipe file whose `modules:` use the module's names.

    step: (module, batch) -> the batch's loss, a scalar tensor on which backward has not been called. batches: the last `unseen` are for the proof, the
    others (4 or more, 8 rank better) are scored. levels, budget, where: as for `mpbridge tune`. options: those of Emulation. The module is restored, without gradients. Raises what `mpbridge tune` raises, BadValue for a step that calls backward
    itself and for batches that are not a sequence, Refused for a module that is frozen or already emulated.
    """
    every = _listed(batches, unseen)
    limit = budget if isinstance(budget, Budget) else budget_of(budget)
    if limit.what == "memory":
        raise BadValue(
            "a memory budget needs a run whose bytes can be counted (--config): for a bare module only time and gradient error are known"
        )
    config, where = get_mixed_precision_config(recipe), where or Where()
    if where.stack is not None:
        raise BadValue(
            f"stack {where.stack}: a stack's settings name megatron-core's linears, not those of another module: leave it out"
        )
    found, notes = aimed(config, levels, where)
    policy = prepared(config)[1]
    refuse_without_linears(module)
    kind = type(module).__name__
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise Refused(
            f"every parameter of {kind} is frozen (requires_grad=False), so there is no gradient to measure: unfreeze those that will be trained"
        )
    asked = TuningRequest(
        config=config,
        levels=found,
        budget=limit,
        batches=len(every) - unseen,
        unseen=unseen,
        pricing=Pricing(machine=where.priced(policy), constants=where.constants),
        fused=False,
        notes=(*notes, *_unreached(module)),
    )
    with _emulated(module, policy, options) as emulation:
        result = tuned(ModuleSubject(module, step, every, emulation, unseen=unseen), asked, say)
    name = str(recipe) if not isinstance(recipe, MixedPrecisionConfig) else ""
    return result, evidence(result, recipe=name, facts={"model": kind, FOREIGN: kind})


@contextmanager
def _emulated(module: torch.nn.Module, policy: PrecisionPolicy, options: Mapping[str, Any]) -> Iterator[Emulation]:
    """`module` in training mode with its linears emulated; restored afterwards, without gradients."""
    emulation, training = emulate_linears(module, policy, **options), module.training
    try:
        module.train()
        yield emulation
    finally:
        emulation.detach()
        module.train(training)
        module.zero_grad(set_to_none=True)


def _listed(batches: Sequence[Any], unseen: int) -> list[Any]:
    if not (hasattr(batches, "__len__") and hasattr(batches, "__getitem__")) or isinstance(batches, (str, Mapping)):
        raise BadValue(
            f"batches is a {type(batches).__name__}, expected a sequence, since each batch is used more than once: "
            f"list(itertools.islice(batches, {ENOUGH + unseen}))"
        )
    if unseen < 2:
        raise BadValue(f"unseen={unseen}: a standard error needs 2 batches or more")
    count = len(batches)
    if count - unseen < FEWEST:
        raise BadValue(
            f"{count} batches, {unseen} of them unseen, leave {max(count - unseen, 0)} to score, and scores of fewer than {FEWEST} rank nothing: "
            f"give {FEWEST + unseen} batches or more ({ENOUGH + unseen} rank better)"
        )
    return [batches[number] for number in range(count)]


def _unreached(module: torch.nn.Module) -> list[str]:
    """Notes on weights that are multiplied outside of `torch.nn.Linear`, such as experts in one tensor: no rule reaches them."""
    held = [
        (f"{name}.{own}" if name else own, type(child).__name__, weight.numel())
        for name, child in module.named_modules()
        if not isinstance(child, (torch.nn.Linear, torch.nn.Embedding))
        for own, weight in child.named_parameters(recurse=False)
        if weight.dim() > 1
    ]
    if not held:
        return []
    share = sum(size for *_, size in held) / sum(weight.numel() for weight in module.parameters())
    name, kind, _ = max(held, key=lambda item: item[2])
    some = "1 weight" if len(held) == 1 else f"{len(held)} weights"
    return [
        f"{share:.0%} of the parameters are in {some} outside of torch.nn.Linear and stay in high precision whatever is chosen, such as {name} of {kind}"
    ]


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
    known = {name: value for name, value in said.items() if value not in (None, [])}
    return {**fields(result.recipes[TUNED], recipe), "evidence": known}


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
        why = error.strerror or error
        raise BadValue(f"--out {path}: {why} (expected a file name in an existing folder)") from None


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
    misfit = "its shapes do not fit the low format"
    return [
        (kind, spans(layers), level, f"{saved / whole:.0%} of all low's damage" if saved > 0 else misfit)
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
    found: list[Sequence[str]] = []
    for name, one in result.proof.items():
        cost = size(result.spent[name]) if memory else f"{result.spent[name]:.3f}"
        figures = (f"{figure:.4f}" for figure in (one.error, one.se, one.bias, one.noise))
        found.append((name, cost, *figures, f"{sum(one.gaps) / len(one.gaps):+.4f}"))
    return found


def lines(result: Tuned, recipe: str) -> list[str]:
    """The sentences below the tables; the verdict last."""
    asked = result.asked
    cost = "bytes of the fullest rank" if asked.budget.what == "memory" else f"over all low's; {asked.pricing.words()}"
    found = [EXPLAINED.format(cost=cost)]
    if math.isnan(result.agreement):
        agreement = "two halves of the batches have no rankings to compare: fewer than three decisions, or all equal"
    else:
        rank = f"rank the decisions with a correlation of {result.agreement:.2f} (Spearman)"
        agreement = f"two halves of the batches {rank}{f': below {AGREE}' if result.pooled else ''}"
    found.append(agreement + (", so layers were pooled to whole kinds" if result.pooled else ""))
    measured = result.proof[TUNED].error
    found.append(f"expected gradient error of the choice: {result.predicted:.4f}; measured: {measured:.4f}")
    found += [f"note: {note}" for note in result.notes]
    found += [f"verdict: {line}" for line in result.verdict.lines]
    if result.verdict.take != TUNED:
        found.append(f"take: {fields(result.recipes[result.verdict.take], recipe)}")
    return found
