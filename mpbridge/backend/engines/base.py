"""What all engines share: building under the device layer, one pass of megatron-core's schedule, evaluating, closing."""

from __future__ import annotations

import itertools
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from mpbridge.backend.devices import device_layer
from mpbridge.backend.devices.products import hold
from mpbridge.backend.engines import shard_state
from mpbridge.backend.engines.contract import Batch, StepResult
from mpbridge.backend.engines.optimizers import CpuFusedAdam
from mpbridge.backend.engines.parallel import from_last_stage, mean_over_data
from mpbridge.backend.megatron.inside_optimizer import gradients, gradients_for_norm, parts, set_moment_dtypes
from mpbridge.backend.megatron.process import advice
from mpbridge.common.formats import DType
from mpbridge.common.upstream import replaced
from mpbridge.planning.rules.table import require_here
from mpbridge.precision.policy import PrecisionPolicy

if TYPE_CHECKING:
    from mpbridge.settings.container import Run


def token_mean(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean loss over the tokens of `mask`, for backward; the same value for reporting), from per-token losses in nats."""
    mask = mask.view(-1).float()
    loss = torch.sum(losses.float().view(-1) * mask) / mask.sum().clamp(min=1.0)
    # the schedule divides this tensor in place, so the reported value needs its own memory
    return loss, loss.detach().clone()


def token_sum(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(summed loss for backward, its number of tokens, mean loss for reporting), as calculate_per_token_loss expects: gradients are divided by
    all tokens of all ranks at the end. Given a mean, megatron-core would add up the ranks' means."""
    mean, report = token_mean(mask, losses)
    tokens = mask.sum()
    return mean * tokens.clamp(min=1.0), tokens.int(), report


def forward_step(
    device: torch.device, batches: Iterator[Batch], model: Any, *, per_token: bool = False
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """megatron-core's forward_step_func: the model's output for the next micro-batch, and its loss function.

    per_token: the config's calculate_per_token_loss.
    """
    batch = next(batches)
    tokens, positions, labels, mask = (
        batch[key].to(device, non_blocking=True) for key in ("tokens", "position_ids", "labels", "loss_mask")
    )
    return model(tokens, positions, None, labels=labels), partial(token_sum if per_token else token_mean, mask)


def update(optimizer: Any) -> tuple[bool, float | None]:
    """(applied, global gradient norm before clipping or None): megatron-core's step, except that weights are never updated with non-finite gradients.

    megatron-core skips such steps only with a loss scaler (FP16); in BF16 and FP32 its own step would write NaN into every parameter.
    """
    if optimizer.prepare_grads():
        return False, None
    found = grad_norm(optimizer)
    norm = float(found)
    if not math.isfinite(norm):
        return False, None
    for part in parts(optimizer):
        if part.config.clip_grad > 0.0:
            clip(part, found)
    stepped = bool(optimizer.step_with_ready_grads())
    if hasattr(optimizer, "allgather_params"):
        optimizer.allgather_params()  # dist_muon's, in its own step()
    return stepped, norm


def learning_rate(optimizer: Any) -> float:
    """The rate of the first group that follows the schedule (`default_config`: without its own multiplier)."""
    groups = optimizer.param_groups
    followers = [group for group in groups if group.get("default_config", True) and group["params"]] or groups
    return float(followers[0]["lr"]) if followers else 0.0


def keep_moments(optimizer: Any, policy: PrecisionPolicy) -> None:
    """Makes FusedAdam keep its moments in the policy's dtypes: megatron-core passes them on only with its precision-aware optimizer."""
    if not policy.narrow_alone:
        return
    dtypes = {role: (getattr(policy, role) or DType.FP32).torch() for role in ("exp_avg", "exp_avg_sq")}
    for part in parts(optimizer):
        set_moment_dtypes(part, dtypes)


def grad_norm(optimizer: Any) -> float | torch.Tensor:
    """Global L2 norm of the gradients that megatron-core's optimizers are about to read, accumulated in FP32 regardless of their dtype; an FP32 tensor where
    megatron-core's own function returns one (0.20 with Transformer Engine's `multi_tensor_scale_tensor`).

    Without Transformer Engine and Apex, megatron-core computes each tensor's norm in the tensor's dtype: three digits in BF16.
    """
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    found = {id(part): gradients_for_norm(part) for part in parts(optimizer)}
    if all(grad.dtype is torch.float32 for grads in found.values() for grad in grads):
        own: float | torch.Tensor = optimizer.get_grad_norm()
        return own
    total = 0.0
    for part in parts(optimizer):
        # the norm of the norms is the global norm: one FP32 number per tensor, no FP32 copy of the gradients
        grads = [torch.linalg.vector_norm(grad, dtype=torch.float32).view(1) for grad in found.get(id(part), [])]
        total += get_grad_norm_fp32(grads, grad_stats_parallel_group=part.get_grad_stats_parallel_group()) ** 2
    return math.sqrt(total)


def clip(part: Any, norm: float | torch.Tensor) -> None:
    """Scales the gradients of one of megatron-core's optimizers in place by clip_grad / `norm`, in any dtype, if `norm` exceeds `clip_grad`. The factor is
    computed in FP32 from a tensor and in FP64 from a number, as megatron-core does: they differ in the last bit.

    megatron-core's own function asserts FP32 gradients (clip_grads.py:167 of 0.16.1).
    """
    factor = part.config.clip_grad / (norm + 1.0e-6)
    if factor < 1.0:
        for grad in gradients(part):
            # with as many dimensions as the gradient, which may have none, an FP32 factor is not rounded to the gradient's dtype
            grad.mul_(factor.view((1,) * grad.dim()) if isinstance(factor, torch.Tensor) else factor)


class BaseEngine(ABC):
    """One rank's model, wrapper and optimizer on megatron-core's schedules; subclasses define how they are built and stepped."""

    name: ClassVar[str]

    def __init__(self, run: Run, *, cuda: bool) -> None:
        self.run = run
        self.cuda = cuda
        self.model: list[Any] = []
        self.optimizer: Any = None
        self.configs: Any = None
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._parallel: Any = None
        self._give_back: Callable[[], None] | None = None

    def _layer(self) -> AbstractContextManager[None]:
        # entered by every method, so that an engine also works for a caller whose device layer has no optimizer; nested entering costs nothing
        return device_layer(self.cuda, fused_adam=None if self.cuda else CpuFusedAdam)

    def _stepping(self) -> AbstractContextManager[None]:
        """The context that forward, backward and update run under."""
        return self._layer()

    @classmethod
    def build(cls, run: Run, *, backend: Any = None) -> Self:
        """Builds the engine of `run`; needs an active device layer and an initialised process group.

        backend: function from a TransformerConfig to a BackendSpecProvider, to build other linears (emulation); None: the device's default.
        Raises Refused with every reason why the machine or the rules do not allow the run, and BadValue for `keep_fp32` globs that cannot be isolated.
        """
        require_here(run.policy, run.facts)
        engine = cls(run, cuda=torch.cuda.is_available())
        try:
            engine._give_back = hold(run.policy)
            with engine._layer(), replaced(*advice()):
                engine._build(backend)
        except BaseException:
            engine.close()
            raise
        return engine

    @abstractmethod
    def _build(self, backend: Any) -> None:
        """Sets model, optimizer and configs."""

    @abstractmethod
    def _zero_grad(self) -> None:
        """Makes model and optimizer ready for a step's first backward pass."""

    @abstractmethod
    def _update(self) -> tuple[bool, float | None]:
        """(applied, global gradient norm before clipping or None)."""

    def train_step(self, batches: Iterator[Batch], *, microbatches: int) -> StepResult:
        """Forward, backward and update over `microbatches` micro-batches of this data-parallel rank."""
        with self._stepping():
            self._zero_grad()
            scale, lr = float(self.optimizer.get_loss_scale()), learning_rate(self.optimizer)
            loss = self._schedule(batches, microbatches, forward_only=False)
            applied, norm = self._update()
            return StepResult(loss=loss, applied=applied, grad_norm=norm, loss_scale=scale, lr=lr)

    def backward(self, batches: Iterator[Batch], *, microbatches: int) -> float:
        """See Engine."""
        with self._stepping():
            self._zero_grad()
            return self._schedule(batches, microbatches, forward_only=False)

    def evaluate(self, batches: Iterator[Batch], *, microbatches: int) -> float:
        """Mean loss in nats per token over the micro-batches and the data-parallel group; nothing that training continues from is changed."""
        with self._stepping(), torch.no_grad(), amaxes_kept(self.model):
            for chunk in self.model:
                chunk.eval()
            return self._schedule(batches, microbatches, forward_only=True)

    def _schedule(self, batches: Iterator[Batch], microbatches: int, *, forward_only: bool) -> float:
        """One pass of megatron-core's schedule; the mean loss, the same on every rank."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from mpbridge.backend.megatron.inside_model import first_microbatch

        if self.run.policy.quantized:
            first_microbatch(self.model)
        several = len(self.model) > 1  # every interleaved chunk reads each micro-batch
        per_token, length = self.configs.model.calculate_per_token_loss, self.run.facts.shape.seq_length
        losses = get_forward_backward_func()(
            forward_step_func=partial(forward_step, self._device, per_token=per_token),
            data_iterator=list(itertools.tee(batches, len(self.model))) if several else batches,
            model=self.model if several else self.model[0],
            num_microbatches=microbatches,
            seq_length=length,
            micro_batch_size=self.run.facts.micro_batch_size,
            decoder_seq_length=length,
            forward_only=forward_only,
        )
        mean = torch.stack(losses).mean() if losses else torch.zeros((), device=self._device)
        return float(from_last_stage(mean_over_data(mean)))

    def close(self) -> None:
        """Frees tensors and megatron-core's process-wide parallel state and restores torch's settings, so that another engine can be built."""
        from mpbridge.backend.megatron.inside_model import release

        if self._give_back is not None:
            self._give_back()
            self._give_back = None
        with self._layer():
            try:
                release(self.model)
                forget_amaxes()
            finally:
                # the process has only one parallel state: a failure above must not block every later engine
                self.model, self.optimizer, self.configs = [], None, None
                if self._parallel is not None:
                    self._parallel.stop()
                    self._parallel = None


class ShardedEngine(BaseEngine):
    """The fully sharded engines: parameters and states are DTensors, updated by one `ShardOptimizer`."""

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """This rank's shards (DTensors) of the parameters that the optimizer updates, by global name."""
        return list(self.optimizer.names.items()) if self.optimizer is not None else []

    def state(self, *, loading: bool = False) -> dict[str, Any]:
        """Sharded state dict: 'model' as the optimizer holds it; 'optimizer' with main weights and moments in FP32, regardless of how the recipe stores them,
        and the loss scaler."""
        with self._layer():
            own = shard_state.optimizer_state(self.optimizer, loading=loading)
            return {"model": shard_state.parameter_state(self.optimizer), "optimizer": own}

    def counted_gradients(self) -> list[tuple[str, torch.Tensor]]:
        """See Engine."""
        return list(self.optimizer.gradients())

    def _zero_grad(self) -> None:
        self.model[0].train()
        self.optimizer.zero_grad()

    def _update(self) -> tuple[bool, float | None]:
        stepped: tuple[bool, float | None] = self.optimizer.step()
        return stepped

    def close(self) -> None:
        """Frees tensors, torch's cached references to the mesh, and megatron-core's process-wide parallel state."""
        try:
            # first: the mesh's process groups are destroyed with the model, at a point where no collective is in flight
            shard_state.forget_shardings()
        finally:
            super().close()

    def load_state(self, state: Mapping[str, Any], *, optimizer: bool = True) -> None:
        """Loads what `state` returned; optimizer=False: weights only, main weights rebuilt from them."""
        with self._stepping():
            shard_state.load_parameters(self.optimizer, state["model"])
            if optimizer:
                shard_state.load_optimizer(self.optimizer, state["optimizer"])


@contextmanager
def amaxes_kept(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Restores the running row of Transformer Engine's amax histories, to which delayed scaling's quantizers add in any forward pass; without gradients no scale
    is computed from it, but the next training step's would be (`DelayedScalingRecipeState.make_quantizers` and `autocast_exit`, quantization.py, 2.11 to 2.20)."""
    modules = [module for chunk in chunks for module in chunk.modules()]

    def rows() -> Iterator[tuple[torch.nn.Module, torch.Tensor]]:
        for module in modules:  # a module has the first, an operation of the fuser the second
            meta = getattr(module, "fp8_meta", None) or (getattr(module, "_fp8_metas", None) or {}).get("forward") or {}
            if (history := getattr(meta.get("scaling_fwd"), "amax_history", None)) is not None:
                yield module, history[0]

    before = {module: row.clone() for module, row in rows()}
    try:
        yield
    finally:
        for module, row in rows():
            row.copy_(before[module]) if module in before else row.zero_()


def forget_amaxes() -> None:
    """Empties Transformer Engine's process-wide lists of amax histories that delayed scaling reduces and updates at the end of every quantization context.

    They hold the tensors of every module that ever ran, and the groups they were reduced over: the process's next model would continue to reduce those
    of the previous one, and wait for ranks that do not (FP8GlobalStateManager.global_amax_buffer, pytorch/quantization.py; pytorch/fp8.py until release 2.7).
    """
    for name in ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"):
        manager: Any = getattr(sys.modules.get(name), "FP8GlobalStateManager", None)
        if manager is not None:
            manager.reset()
            return
