"""Tuning the model of a configuration (on megatron-core, on this machine, from a checkpoint's weights or from scratch), and any module with a loss, which needs no megatron-core."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpbridge.common.errors import BadValue, Refused
from mpbridge.common.probe import installed
from mpbridge.common.tables import processes
from mpbridge.numerics import Emulation, emulate_linears
from mpbridge.numerics.modules import refuse_without_linears
from mpbridge.precision.config import MixedPrecisionConfig, plain_states
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.registry import FOREIGN, get_mixed_precision_config
from mpbridge.settings.training import microbatches
from mpbridge.training.checkpoint import store
from mpbridge.training.tune.levels import Budget, Levels, Pricing, Where, aimed, budget_of, expressible, prepared
from mpbridge.training.tune.proof import EngineSubject, ModuleSubject
from mpbridge.training.tune.report import evidence
from mpbridge.training.tune.tuning import ENOUGH, FEWEST, Tuned, TuningRequest, refuse_bad, tuned

if TYPE_CHECKING:
    from mpbridge.settings.container import ConfigContainer, Run


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
        config = run.stages[0].config
        base, policy = prepared(config)
        found, left_out = aimed(config, levels, where)
        target = where.priced(policy)
        priced = container.resolved(world, machine=target, versions=where.versions, training=False).facts
        found, notes = expressible(
            found, base, run=priced if where.machine else None, stack=where.stack, asked=levels is not None
        )
        asked = TuningRequest(
            config=config,
            levels=found,
            budget=budget or Budget(),
            batches=batches,
            unseen=unseen,
            pricing=Pricing(machine=target, constants=where.constants),
            run=dataclasses.replace(priced, machine=target),
            seed=int(run.train.get("seed") or 1234),
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
    found, notes = _aimed(config, levels, where)
    policy = prepared(config)[1]
    refuse_without_linears(module)
    _refuse_frozen(module)
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
    kind = type(module).__name__
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


def _aimed(config: MixedPrecisionConfig, levels: Sequence[str] | None, where: Where) -> tuple[Levels, list[str]]:
    """As `aimed`, for a module. Raises BadValue for a stack."""
    if where.stack is not None:
        raise BadValue(
            f"stack {where.stack}: a stack's settings name megatron-core's linears, not those of another module: leave it out"
        )
    return aimed(config, levels, where)


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


def _refuse_frozen(module: torch.nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise Refused(
            f"every parameter of {type(module).__name__} is frozen (requires_grad=False), so there is no gradient to measure: "
            "unfreeze those that will be trained"
        )


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
