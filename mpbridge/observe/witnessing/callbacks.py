"""A witness in other projects' trainers: Hugging Face's Trainer, Lightning's Trainer, Lightning's Fabric, Megatron Bridge. Each is imported on demand."""

from __future__ import annotations

import functools
import importlib
import weakref
from typing import Any

from mpbridge.common.errors import Refused
from mpbridge.observe.witnessing.report import Witnessed
from mpbridge.observe.witnessing.witness import OnFault, Policy, Witness


class Following:
    """A witness created when the first step begins, which is when a trainer has its model and optimizer."""

    def __init__(self, policy: Policy | None = None, **how: Any) -> None:
        self._scaler = how.pop("scaler", None)
        self._policy, self._how = policy, how
        self.witness: Witness | None = None
        self._of: tuple[Any, Any] = (None, None)
        self._earlier: list[Witnessed] = []
        self._evaluating = False

    @property
    def reports(self) -> list[Witnessed]:
        """The reports of all observed steps."""
        return self._earlier + ([] if self.witness is None else self.witness.reports)

    @property
    def report(self) -> Witnessed:
        """The latest report."""
        return self.reports[-1]

    def begins(self, number: int, model: Any, optimizer: Any, scaler: Any = None) -> None:
        """Starts step `number` (from 1), or continues it with its next micro-batch."""
        if self.witness is not None and (self._of[0] is not model or self._of[1] is not optimizer):
            # another run of the same trainer, after an exception perhaps, of which it does not tell its callbacks
            self._earlier = self.reports
            self.gives_up()
            self.witness = None
        if self.witness is None:
            self._of = (model, optimizer)
            self.witness = Witness(model, optimizer, self._policy, scaler=scaler or self._scaler, **self._how)
        if self.witness.observing and self.witness.taken != number:
            self.gives_up()  # a step that ended in an exception
        if not self.witness.observing and self.witness.due(number):
            self.witness.taken = number
            self.witness.begin()

    def ends(self) -> None:
        """Ends the step."""
        if self.witness is not None and self.witness.observing:
            self.witness.end()

    def evaluates(self) -> None:
        """Starts observation of an evaluation, unless one since the last observed step was seen, or a step is not at its end."""
        seen = self.reports
        if self.witness is not None and not self.witness.observing and seen and not seen[-1].evaluation:
            self._evaluating = True
            self.witness.begin()

    def evaluated(self) -> None:
        """Ends that, after the evaluation's first batch."""
        if self.witness is not None and self._evaluating:
            self._evaluating = False
            self.witness.end(trains=False)

    def gives_up(self) -> None:
        """Drops an unfinished step."""
        self._evaluating = False
        if self.witness is not None:
            self.witness.let_go()

    def on_train_end(self, *ignored: Any, **parts: Any) -> None:
        """The last thing that a trainer tells."""
        self.gives_up()


def _need(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = f"this callback requires {package}, which cannot be imported ({error})"
        raise Refused(f"{what}: pip install {package}") from None


def trainer_callback(policy: Policy | None = None, **how: Any) -> Any:
    """A TrainerCallback for Hugging Face's Trainer; `how` as for witness(). `callback.report` is the latest report. Raises Refused without transformers."""
    transformers = _need("transformers", "transformers")

    class TrainerWitness(Following, transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        """Observes the steps that are due, and the first batch of the first evaluation after each; on_step_end runs after the update, which torch's own hook has
        reported by then."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            optimizer = parts["optimizer"]
            self.begins(state.global_step + 1, parts["model"], optimizer, getattr(optimizer, "scaler", None))

        def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            self.ends()
            if control.should_evaluate:
                self.evaluates()

        def on_prediction_step(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            self.evaluated()

    return TrainerWitness(policy, **how)


def lightning_callback(policy: Policy | None = None, **how: Any) -> Any:
    """A Callback for Lightning's Trainer; `how` as for witness(). Raises Refused without lightning."""
    try:
        base = importlib.import_module("lightning.pytorch").Callback
    except ImportError:
        base = _need("pytorch_lightning", "lightning").Callback

    class LightningWitness(Following, base):  # type: ignore[misc,valid-type]
        """Observes the steps that are due, each from its first batch to the batch after which the trainer's global step has increased, and the first batch of
        the first validation after each."""

        _step = 0

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
            self._step = trainer.global_step
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            optimizers = trainer.optimizers[0] if len(trainer.optimizers) == 1 else trainer.optimizers
            self.begins(trainer.global_step + 1, trainer.strategy.model, optimizers, scaler)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
            if trainer.global_step > self._step:
                self.ends()

        def on_validation_batch_start(self, *ignored: Any) -> None:
            self.evaluates()

        def on_validation_batch_end(self, *ignored: Any) -> None:
            self.evaluated()

        def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
            self.gives_up()

    return LightningWitness(policy, **how)


_FOLLOWING: weakref.WeakSet[Following] = weakref.WeakSet()
"""The callbacks of Megatron Bridge's loop, which tells none of them that a step has raised."""


def bridge_callback(policy: Policy | None = None, *, on_fault: OnFault = "raise", **how: Any) -> Any:
    """A Callback for Megatron Bridge's `pretrain` and `finetune`; `how` as for witness(), with steps counted from the start of this run.

    policy: what `mpbridge.compat.megatron_bridge.apply` was given; None: steps are described. The first batch of the first evaluation is observed too, in
    `callback.evaluation`. A difference from the policy raises AuditFailed on every rank after the step. Make it before `pretrain` is called.
    Raises Refused without megatron-bridge.
    """
    base = _need("megatron.bridge.training.callbacks", "megatron-bridge").Callback
    train: Any = importlib.import_module("megatron.bridge.training.train")
    for name in ("train_step", "evaluate_and_print_results"):
        if not hasattr(getattr(train, name), "_mpbridge"):
            setattr(train, name, _left_on_error(getattr(train, name)))

    class BridgeWitness(Following, base):  # type: ignore[misc,valid-type]
        """Observes the steps that are due, from before the first micro-batch to after the update, and one batch of an evaluation."""

        _taken = 0
        evaluation: Witness | None = None
        """The witness of the evaluation."""

        def on_train_start(self, context: Any) -> None:
            self._taken = 0

        def on_train_step_start(self, context: Any) -> None:
            self.begins(self._taken + 1, context.model, context.optimizer)

        def on_train_step_end(self, context: Any) -> None:
            self._taken += 1
            self.ends()

        def on_eval_step_start(self, context: Any) -> None:
            if self.evaluation is None and self._of[1] is not None:  # an evaluation's context has no optimizer
                self.evaluation = Witness(context.model, self._of[1], policy, on_fault=on_fault, **how)
                self.evaluation.taken = self._taken  # the step that it follows
                self.evaluation.begin()

        def on_eval_step_end(self, context: Any) -> None:
            if self.evaluation is not None and self.evaluation.observing:
                self.evaluation.end(trains=False)

        def gives_up(self) -> None:
            super().gives_up()
            if self.evaluation is not None:
                self.evaluation.let_go()

    made = BridgeWitness(policy, on_fault=on_fault, **how)
    _FOLLOWING.add(made)
    return made


def _left_on_error(original: Any) -> Any:
    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except BaseException:
            for callback in _FOLLOWING:
                callback.gives_up()
            raise

    step._mpbridge = True  # type: ignore[attr-defined]
    return step


class FabricWitness(Following):
    """A callback for Lightning's Fabric: `fabric.call("on_train_batch_start", model=..., optimizer=...)` before each step of the loop, and
    `fabric.call("on_train_batch_end")` after it; `how` as for witness()."""

    _taken = 0

    def on_train_batch_start(self, model: Any, optimizer: Any) -> None:
        """Starts a step."""
        self.begins(self._taken + 1, model, optimizer)

    def on_train_batch_end(self) -> None:
        """Ends a step."""
        self._taken += 1
        self.ends()
