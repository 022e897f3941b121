"""The interface that every engine offers to the training loop, the audit and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    import torch

    from mpbridge.settings.container import Run

Batch = Mapping[str, "torch.Tensor"]
"""One micro-batch: tokens, labels, position_ids (int64) and loss_mask (fp32), each [micro_batch, sequence], on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimizer step did; the same on every rank."""

    loss: float
    """Mean over micro-batches and the data-parallel group, nats per token; also broadcast to pipeline stages that do not compute it."""
    applied: bool
    """False: gradients overflowed or were not finite and the update was skipped."""
    grad_norm: float | None
    """Global norm before clipping; None if none was computed (skipped step)."""
    loss_scale: float
    """The scale that this step's loss was multiplied by (1.0 without one)."""
    lr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """One tensor that exists on this rank at this moment."""

    role: str
    """'params', 'grads', 'main_params', 'main_grads', 'exp_avg', 'exp_avg_sq', 'buffers', 'padding'."""
    parameter: str
    """Global name, as in the unwrapped model; '' for a buffer that many parameters share."""
    tensor: torch.Tensor
    """Local shard, in its actual dtype; read-only for callers."""


@runtime_checkable
class Engine(Protocol):
    """A model, its wrapper and its optimizer, built for one `Run`. Can be closed and rebuilt within one process."""

    name: str
    run: Run
    model: list[Any]
    """Model chunks of this rank, as the schedule sees them (wrapped)."""
    optimizer: Any
    """Has `param_groups` (lr and weight_decay are read by megatron-core's OptimizerParamScheduler)."""

    @classmethod
    def build(cls, run: Run) -> Self:
        """Model, wrapper and optimizer; needs an active device layer and an initialised process group."""

    def train_step(self, batches: Iterator[Batch], *, microbatches: int) -> StepResult:
        """Forward, backward and update over `microbatches` micro-batches of this data-parallel rank."""

    def backward(self, batches: Iterator[Batch], *, microbatches: int) -> float:
        """Forward and backward without an update; the mean loss, as `evaluate` has it. The gradients are then in `counted_gradients`."""

    def counted_gradients(self) -> list[tuple[str, torch.Tensor]]:
        """(parameter, its current reduced gradient), each element on one rank of the job only: for a sharded gradient this rank's part."""

    def evaluate(self, batches: Iterator[Batch], *, microbatches: int) -> float:
        """Mean loss in nats per token over the micro-batches and the data-parallel group; no weight is updated."""

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Parameters of this rank by their global name (layer numbers counted over all pipeline stages)."""

    def tensors(self) -> Iterable[Live]:
        """Every tensor that plays a role, as it exists at this moment. Moments and main weights exist after the first applied update."""

    def state(self, *, loading: bool = False) -> dict[str, Any]:
        """Sharded state dict of model and optimizer for megatron-core's dist_checkpointing."""

    def load_state(self, state: Mapping[str, Any], *, optimizer: bool = True) -> None:
        """Loads what `state` returned; optimizer=False: weights only, main weights rebuilt from them."""

    def close(self) -> None:
        """Frees tensors and megatron-core's process-wide parallel state, so that another engine can be built."""
