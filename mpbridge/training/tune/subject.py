"""What is tuned: a run's model on its engine, or any module with a loss; both provide gradients for numbered batches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpbridge.common.errors import BadValue, DataError
from mpbridge.numerics import Emulation

if TYPE_CHECKING:
    from mpbridge.backend.engines.contract import Batch
    from mpbridge.training.data.batches import Feed

BatchSource = str
"""'train': batches for scoring; 'valid': batches not used for scores."""


class Subject(Protocol):
    """A model whose linears are emulated."""

    emulation: Emulation

    def backward(self, split: BatchSource, number: int) -> float:
        """Forward and backward of a global batch, in the emulation's current state; returns the loss, which need not be finite."""

    def gradients(self) -> list[torch.Tensor]:
        """The gradients of that batch, each element on one rank of the job only; valid until the next one."""


@contextlib.contextmanager
def same_draws(number: int) -> Iterator[None]:
    """Random draws in the block depend only on the batch's number, so that every policy has the same dropout masks; the outer generators are unaffected."""
    with torch.random.fork_rng():
        torch.manual_seed(number)
        yield


@contextlib.contextmanager
def same_parallel_draws() -> Iterator[None]:
    """The same for the generators that tensor-parallel ranks draw dropout from: every batch begins with the same state."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    before = tracker.get_states()
    try:
        yield
    finally:
        tracker.set_states(before)


class EngineSubject:
    """A run's model on the megatron-core engine; a batch is a global batch of the run."""

    def __init__(self, engine: Any, feed: Feed, *, microbatches: int, rank: int, ranks: int) -> None:
        self.engine, self.emulation, self.feed = engine, engine.emulation, feed
        self._micro, self._rank, self._ranks = microbatches, rank, ranks

    def backward(self, split: BatchSource, number: int) -> float:
        """See Subject."""
        size = int(self.feed.run.train["global_batch_size"])
        stream: Iterator[Batch] = islice(self.feed.batches(split, number * size, self._rank, self._ranks), self._micro)
        with same_draws(number), same_parallel_draws():
            return float(self.engine.backward(stream, microbatches=self._micro))

    def gradients(self) -> list[torch.Tensor]:
        """See Subject."""
        return [gradient for _, gradient in self.engine.counted_gradients()]


class ModuleSubject:
    """Any module: `loss(module, batch)` returns a scalar with a graph behind it; the last `unseen` batches are for the proof."""

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Callable[[torch.nn.Module, Any], torch.Tensor],
        batches: Sequence[Any],
        emulation: Emulation,
        *,
        unseen: int,
    ) -> None:
        self.module, self.loss, self.emulation = module, loss, emulation
        self.batches = {
            "train": list(batches[: len(batches) - unseen]),
            "valid": list(batches[len(batches) - unseen :]),
        }
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def backward(self, split: BatchSource, number: int) -> float:
        """See Subject."""
        for parameter in self.parameters:
            parameter.grad = None
        with same_draws(number):
            loss = self.loss(self.module, self.batches[split][number])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise BadValue(
                f"the step returned {type(loss).__name__}{tuple(loss.shape) if isinstance(loss, torch.Tensor) else ''}, expected the "
                "batch's loss: a scalar tensor with its graph, on which backward has not been called"
            )
        if any(parameter.grad is not None for parameter in self.parameters):
            raise BadValue(
                "the step called backward itself: expected a step that returns the batch's loss without calling backward (or the optimizer), "
                "since gradients are computed several times in several formats"
            )
        with same_draws(number):
            # activation recomputation restores its own state
            torch.autograd.backward(loss)
        return float(loss.detach())

    def gradients(self) -> list[torch.Tensor]:
        """See Subject."""
        found = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not found:
            raise BadValue("the step's loss has no gradient for any parameter, so nothing can be measured")
        return found


def high_precision(subject: Subject, split: BatchSource, number: int) -> float:
    """Forward and backward of a global batch in high precision; the loss. Raises DataError if it is not finite; every rank has the same loss."""
    with contextlib.ExitStack() as stack:
        if not subject.emulation.is_paused:
            stack.enter_context(subject.emulation.paused())
        loss = subject.backward(split, number)
    if not math.isfinite(loss):
        raise DataError(
            f"the loss of {'scoring' if split == 'train' else 'unseen'} batch {number + 1} is {loss}: a NaN or an overflow in the data or the "
            "weights, which no format fixes (check that batch, or start from another checkpoint)"
        )
    return loss
