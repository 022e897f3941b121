"""What is tuned: a model of a run on its engine, or anybody's module with a loss; both answer with gradients for numbered batches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from mpbridge.emulation import Emulation
from mpbridge.errors import BadValue, DataError

if TYPE_CHECKING:
    from mpbridge.data.batches import Feed
    from mpbridge.engines.contract import Batch

BatchSource = str
"""'train': batches for scoring; 'valid': batches that no score has seen."""


class Subject(Protocol):
    """A model whose linears an emulation holds."""

    emulation: Emulation

    def backward(self, split: BatchSource, number: int) -> float:
        """Forward and backward of a global batch, under whatever the emulation does now; the loss, which need not be finite."""

    def gradients(self) -> list[torch.Tensor]:
        """The gradients of that batch, each element on one rank of the job only; valid until the next one."""


@contextlib.contextmanager
def same_draws(number: int) -> Iterator[None]:
    """Draws inside are a function of the batch's number, so that every policy sees the same dropout masks; generators outside stay where they are."""
    with torch.random.fork_rng():
        torch.manual_seed(number)
        yield


@contextlib.contextmanager
def same_parallel_draws() -> Iterator[None]:
    """The same for the generators that tensor-parallel ranks draw dropout from: every batch begins with the same state of theirs."""
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
    """Any module: `loss(module, batch)` returns a scalar with a graph behind it; the first `unseen` of the batches' end are for the proof."""

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
                "the step called backward itself: expected a step that returns the batch's loss and leaves backward (and the optimizer) out, "
                "since gradients are taken several times under several formats"
            )
        with same_draws(number):
            # activation recomputation restores its own state
            torch.autograd.backward(loss)
        return float(loss.detach())

    def gradients(self) -> list[torch.Tensor]:
        """See Subject."""
        found = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not found:
            raise BadValue("the step's loss gives no parameter a gradient: nothing can be measured")
        return found


def high_precision(subject: Subject, split: BatchSource, number: int) -> float:
    """Forward and backward of a global batch in high precision; the loss. Raises DataError where it is not finite: every rank has the same."""
    with contextlib.ExitStack() as stack:
        if not subject.emulation.is_paused:
            stack.enter_context(subject.emulation.paused())
        loss = subject.backward(split, number)
    if not math.isfinite(loss):
        raise DataError(
            f"the loss of {'scoring' if split == 'train' else 'unseen'} batch {number + 1} is {loss}: a NaN or an overflow in the data or the "
            "weights, which no format cures (look at that batch, or begin from another checkpoint)"
        )
    return loss


def summed(values: list[float]) -> list[float]:
    """Sums over the ranks of the job."""
    if not _several():
        return values
    found = torch.tensor(values, dtype=torch.float64, device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(found)
    return [float(value) for value in found]


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
