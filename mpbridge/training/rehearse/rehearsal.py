"""Rehearsals: the same run under several recipes with statistics; and what is measured at the end of each: the gradient's error against high precision, and the error of every linear's
three products."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mpbridge.backend.devices.collectives import from_all
from mpbridge.common.errors import MpbridgeError
from mpbridge.common.pages.about import data_text, model_text
from mpbridge.common.report.console import rank
from mpbridge.numerics import Emulation
from mpbridge.numerics.scales import DEFAULT_RELEASE
from mpbridge.numerics.statistics import Statistics
from mpbridge.precision.policy import LossScale
from mpbridge.precision.regions import GEMMS, Gemm, Quant
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.settings.container import ConfigContainer, Run
from mpbridge.settings.other_recipe import with_recipe
from mpbridge.settings.training import microbatches
from mpbridge.training.admission import resume_point
from mpbridge.training.base import Hook, Training
from mpbridge.training.checkpoint.io import load
from mpbridge.training.loop import pretrain
from mpbridge.training.process import data_parallel, process_group
from mpbridge.training.rehearse.report import OWN_ERROR, ProductErrors, RecipeMeasurement, Rehearsal, Rehearsed
from mpbridge.training.tune.proof import EngineSubject, prove, require_gradients
from mpbridge.training.tune.scores import Scorer, merged

RECIPES = (
    "bf16_mixed", "bf16_with_fp8_delayed_scaling_mixed", "bf16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_subchannel_scaling_mixed", "bf16_with_mxfp8_mixed", "bf16_with_nvfp4_mixed",
)  # fmt: skip
"""The recipes rehearsed by default: high precision and each scaling once."""
RELEASE = ".".join(map(str, DEFAULT_RELEASE))
LR = 1e-4
"""Used if the configuration sets no learning rate, as for a Hugging Face folder."""
SAMPLES = 10
"""Number of steps sampled in a rehearsal, unless `every` is given."""


class Listen(Hook):
    """Collects losses, and statistics from an emulated engine. weights: a checkpoint to start from."""

    def __init__(self, statistics: Statistics, weights: Path | None) -> None:
        self.statistics, self.weights, self.losses = statistics, weights, list[float]()
        self.quantized, self.high, self.notes = list[str](), list[str](), list[str]()
        self.measured: RecipeMeasurement | None = None

    def finished(self, training: Training) -> None:
        """Compares gradients, and the products of every linear, with high precision's."""
        emulation: Emulation | None = getattr(training.engine, "emulation", None)
        if emulation is not None:
            emulation.observer = None
            self.measured = measure(training)

    def built(self, training: Training) -> None:
        """Loads the checkpoint's weights. Raises Refused before the first step for an engine whose gradients cannot be compared after the last."""
        if getattr(training.engine, "emulation", None) is not None:
            require_gradients(training.engine)
        if self.weights is not None:
            load(training, self.weights, weights_alone=True)

    def started(self, training: Training) -> None:
        """Starts observing."""
        emulation: Emulation | None = getattr(training.engine, "emulation", None)
        if emulation is not None:
            emulation.observer = self.statistics
            self.quantized, self.high = list(emulation.plugs), list(emulation.high)
            self.notes = list(emulation.notes()[1:])
        self.statistics.step(1)

    def stepped(self, training: Training, result: Any) -> None:
        """Records the loss and moves on to the next step."""
        self.losses.append(result.loss)
        scale = training.run.policy.loss_scale
        if scale is not None and scale.dynamic and not result.applied:  # it finds its value by overflowing
            self.statistics.drop()
        self.statistics.step(training.counters.iteration + 1)


def rehearse(
    container: ConfigContainer,
    recipes: Sequence[str] = RECIPES,
    *,
    steps: int = 50,
    every: int | None = None,
    say: Callable[[str], None] = print,
) -> Rehearsal:
    """Trains `container`'s model under each recipe from the same seed, data and initialisation, emulated, and reports what happened to the
    tensors. checkpoint.load gives the weights that all start from; optimizer, schedule and data start fresh.

    every: sample one step in `every`; None: ten steps in all. A recipe that cannot run is in the result with the reason.
    Nothing is saved. Raises UnknownName for a recipe and CheckpointError for a checkpoint that does not
    exist, before anything runs. In several processes every rank gets the whole result: for a tensor spread over several ranks, the part with
    the largest error.
    """
    for name in recipes:
        get_mixed_precision_config(name)
    weights = resume_point(dict(container.checkpoint))
    title = f"Rehearsal of {len(recipes)} recipe{'s' if len(recipes) != 1 else ''}, {steps} step{'s' if steps != 1 else ''} each"
    result = Rehearsal(title=title, made=_made(container, steps))
    if weights is not None:
        result.made["weights"] = str(weights)
    # one process group for all: a recipe's engine is closed before the next one's is built
    with process_group(torch.cuda.is_available()):
        for name in recipes:
            found = _one(container, name, steps, Listen(Statistics(every=every or max(1, steps // SAMPLES)), weights))
            result.recipes.append(found)
            word, reasons = found.verdict()
            if rank() == 0:
                say(f"{name}: {word} ({reasons[0]}), {found.seconds:.0f} s")
            if found.interrupted:
                result.title += f" (interrupted: {found.interrupted})"
                break
    return result


def _made(container: ConfigContainer, steps: int) -> dict[str, Any]:
    import megatron.core

    config = {name: dict(getattr(container, name)) for name in ("model", "data", "train")}
    given = container.optimizer.get("lr")
    return {
        "model": model_text(config),
        "data": data_text(config),
        "learning rate": f"{LR:g} (none was set)" if given is None else given,
        "steps": steps,
        "seed": container.train.seed,
        "torch": torch.__version__,
        "megatron-core": megatron.core.__version__,
        "rules of Transformer Engine": RELEASE,
    }


def _run(container: ConfigContainer, recipe: str, steps: int) -> Run:
    """The run of one recipe: emulated, without evaluation, output files or resume."""
    made = container.copy()
    made.mixed_precision, made.emulate = with_recipe(made.mixed_precision, recipe), True
    if made.optimizer.get("lr") is None:
        # a Hugging Face folder does not say how the model is trained
        made.optimizer["lr"] = LR
    made.train.train_iters, made.train.eval_interval, made.train.eval_iters, made.train.audit = steps, None, 0, "warn"
    made.checkpoint = {}
    made.logger = {"log_dir": None, "tensorboard": False, "progress": False, "precision_every": 0}
    started = torch.distributed.is_initialized()
    return made.resolved(torch.distributed.get_world_size() if started else made.smallest_world())


def _one(container: ConfigContainer, recipe: str, steps: int, ear: Listen) -> Rehearsed:
    began, failure, stopped = time.perf_counter(), None, None
    try:
        run = _run(container, recipe, steps)
        done = pretrain(run, hooks=[ear], quiet=True)
        if done.stopped is not None and done.iterations < steps:
            stopped = f"{done.stopped} after {done.iterations} of {steps} steps"
        elif done.iterations and not done.applied and all(map(math.isfinite, ear.losses)):
            failure = f"0 of {done.iterations} steps were applied, so nothing was trained{_cure(run.policy.loss_scale)}"
    except MpbridgeError as error:
        failure = error.line
    # without the first fifth, in which delayed scaling is still finding its scales
    parts = from_all((ear.statistics.summary(warmup=steps // 5), ear.quantized, ear.high, failure))
    tensors: dict[tuple[str, str], dict[str, Any]] = {}
    for row in (row for part in parts for row in part[0]):
        known = tensors.setdefault((row["tensor"], row["copy"]), row)
        if (row["row_error"] or 0.0) > (known["row_error"] or 0.0):
            tensors[row["tensor"], row["copy"]] = row
    return Rehearsed(
        recipe=recipe,
        losses=ear.losses,
        seconds=time.perf_counter() - began,
        quantized=len({name for part in parts for name in part[1]}),
        high=len({name for part in parts for name in part[2]}),
        notes=ear.notes,
        tensors=list(tensors.values()),
        measured=ear.measured,
        interrupted=stopped,
        failure=next((part[3] for part in parts if part[3] is not None), None),
    )


def _cure(scale: LossScale | None) -> str:
    """What lets the steps of a rehearsal be applied; it takes no settings of the recipe but its name."""
    if scale is None:
        return ""
    more, name = ("more steps, or ", "initial_loss_scale") if scale.dynamic else ("", "loss_scale")
    return f": all overflowed under the loss scale (cure: {more}a recipe file with a lower {name})"


BATCHES = 4
"""Global batches on which gradients are compared."""
SIDES: Mapping[Gemm, tuple[str, str]] = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}


def measure(training: Training) -> RecipeMeasurement:
    """The figures of an emulated run in its current state. Every rank calls it.

    Weights do not change; scales of delayed scaling continue from their current state.
    """
    rank, ranks = data_parallel()
    batches = microbatches(training.run.train, ranks)
    subject = EngineSubject(training.engine, training.feed, microbatches=batches, rank=rank, ranks=ranks)
    gradient = prove(subject, {"own": subject.emulation.policy}, BATCHES, split="train")["own"]
    # torchao's linears show their operands to no listener
    products = _products(subject) if isinstance(subject.emulation, Emulation) else []
    return RecipeMeasurement(gradient=gradient, products=products)


def _products(subject: EngineSubject) -> list[ProductErrors]:
    """The errors of every linear's three products over a batch, worst first."""
    emulation = subject.emulation
    quants: dict[str, Quant] = {quant.scaling: quant for quant in emulation.policy.quants if not quant.row.history}
    scorer = Scorer(quants, emulation)
    if quants:
        with emulation.listening(scorer):
            subject.backward("train", 0)
    own = {name: plug.quantizer.quant.scaling for name, plug in emulation.plugs.items()}
    found = []
    known = {slot: scaling for part in from_all(own) for slot, scaling in part.items()}
    for (slot, scaling), sums in merged(from_all(scorer.halves[0])).items():
        if known.get(slot) == scaling:
            errors = {gemm: sums.relative(gemm) for gemm in GEMMS}
            excess = max(error / _own(quants[scaling], gemm) for gemm, error in errors.items())
            found.append(ProductErrors(linear=slot, errors=errors, excess=excess))
    return sorted(found, key=lambda one: -one.excess)


def _own(quant: Quant, gemm: Gemm) -> float:
    """The format's error for that product of Gaussian operands: both operands' errors, which are independent."""
    errors = (OWN_ERROR[quant.element(gradient=side == "dy"), side] for side in SIDES[gemm])
    return math.sqrt(sum(error * error for error in errors))
