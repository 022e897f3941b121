"""The Megatron-FSDP engine: megatron-core 0.16.1's own fully sharded wrapper, with one main copy and one gradient that everybody reads."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mpbridge.engines.base import ShardedEngine
from mpbridge.engines.contract import Batch, Live, StepResult
from mpbridge.formats import DType
from mpbridge.megatron.configs import sections
from mpbridge.precision.policy import PrecisionPolicy

if TYPE_CHECKING:
    from mpbridge.config.container import Run

log = logging.getLogger("mpbridge")


class MegatronFsdpEngine(ShardedEngine):
    """GPTModel in Float16Module in FullyShardedDataParallel, updated by torch's AdamW or FusedAdam on the wrapper's own shards.

    megatron-core 0.16.1's optimizer factory is not used here: with a precision-aware optimizer it gives FusedAdam `use_decoupled_grad`, while the wrapper
    puts gradients on `.grad`, so no weight ever moves; and it lets FusedAdam keep a second main copy. (Megatron-LM PRs 4024, 3746, 4133 and 4427.)
    """

    name = "megatron_fsdp"

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        with self._layer(), _indexed_device(self.cuda):
            yield

    def _build(self, backend: Any) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

        from mpbridge.engines.parallel import ModelParallel
        from mpbridge.engines.shard_optimizer import ShardOptimizer
        from mpbridge.megatron.configs import build_targets
        from mpbridge.models.gpt import build_chunks

        run = self.run
        self.configs = build_targets(run, cuda=self.cuda, inputs=_sections(run, cuda=self.cuda))
        self._parallel = ModelParallel(run.facts.parallel, seed=int(run.train.get("seed", 1234)))
        config = self.configs.model
        config.gradient_accumulation_fusion = False  # its kernel writes past the wrapper's buckets
        (chunk,) = build_chunks(config, self.configs.gpt, run.policy, cuda=self.cuda, backend=backend)
        with _indexed_device(self.cuda):
            wrapped = FullyShardedDataParallel(config, self.configs.ddp, chunk, device=self._device)
        self.model = [wrapped]
        # nobody hands gradients over on `decoupled_grad` here, so nobody may think so
        self.configs.optimizer.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = False
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if group.size() == 1:
            _do_not_reduce(wrapped)
        parameters = {_short(name): parameter for name, parameter in self._buffer.optimizer_named_parameters}
        self.optimizer = ShardOptimizer(
            parameters,
            _held(run.policy),
            self.configs.optimizer,
            group,
            cuda=self.cuda,
            offset=partial(_offset, self._buffer),
        )
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if self.configs.ddp.data_parallel_sharding_strategy != "optim":
            # under no_sync 0.16.1 reduces ZeRO-1's gradients after backward and again in finish_grad_sync: 2/N of the mean comes out, which is right
            # at two processes only (seen at four); without it they are reduced once
            config.no_sync_func = wrapped.no_sync

    @property
    def _buffer(self) -> Any:
        return self.model[0].param_and_grad_buffer

    def train_step(self, batches: Iterator[Batch], *, microbatches: int) -> StepResult:
        """Forward, backward and update over `microbatches` micro-batches of this data-parallel rank."""
        from mpbridge.engines.steps import learning_rate

        with self._stepping():
            wrapped = self.model[0]
            wrapped.train()
            wrapped.zero_grad_buffer()
            scale, lr = self.optimizer.get_loss_scale(), learning_rate(self.optimizer)
            loss = self._schedule(batches, microbatches, forward_only=False)
            applied, norm = self.optimizer.step()
            self._install()
            return StepResult(loss=loss, applied=applied, grad_norm=norm, loss_scale=scale, lr=lr)

    def _install(self) -> None:
        """Main weights into the model's own, and the first of them on their way to all ranks."""
        self._buffer.copy_main_weights_to_model_weights()
        self.model[0].start_param_sync()
        if not self.cuda:
            self._settle()

    def _settle(self) -> None:
        """Waits for the gathers under way: gloo's threads would otherwise write into memory that somebody has freed meanwhile."""
        pipeline = self.model[0].module.all_gather_pipeline
        while pipeline.param_gather_event_map:
            pipeline.wait_bucket_ready(*next(iter(pipeline.param_gather_event_map)))

    def close(self) -> None:
        """Frees tensors and megatron-core's process-wide parallel state, once no gather is under way any more."""
        if self.model and not self.cuda:
            with self._stepping():
                self._settle()
        super().close()

    def tensors(self) -> Iterable[Live]:
        """Every tensor that plays a role, as it exists now: the wrapper's buffers and the optimizer's states, local shards."""
        from mpbridge.engines.shard_state import live_states

        buffers = list(_live_buffers(self._buffer))
        yield from buffers
        yield from _copied_gradients(self.optimizer.shards, buffers)
        yield from live_states(self.optimizer)
        for name, buffer in self.model[0].named_buffers():
            yield Live(role="buffers", parameter=_short(name), tensor=buffer)

    def load_state(self, state: Mapping[str, Any], *, optimizer: bool = True) -> None:
        """Takes back what `state` described; optimizer=False: weights only."""
        super().load_state(state, optimizer=optimizer)
        with self._stepping():
            self._install()


def _sections(run: Run, *, cuda: bool) -> dict[str, Any]:
    """The run's inputs with what the wrapper needs: the distributed optimizer's flag, and no NCCL-only reduction on gloo."""
    inputs: dict[str, Any] = sections(run, cuda=cuda)
    if not run.inputs["ddp"].get("use_distributed_optimizer"):
        log.info("Megatron-FSDP shards optimizer states: ddp.use_distributed_optimizer is on")
    inputs["ddp"] |= {"use_megatron_fsdp": True, "use_distributed_optimizer": True}
    inputs["optimizer"]["use_distributed_optimizer"] = True
    if not cuda:
        # the fused multiply is NCCL's PREMUL_SUM
        inputs["ddp"]["gradient_reduce_div_fusion"] = False
    return inputs


@contextmanager
def _indexed_device(cuda: bool) -> Iterator[None]:
    """The wrapper makes 'cuda:<current device>' of a number; the CPU layer's current device is no number. And it warns that a CPU is no such device."""
    if cuda:
        yield
        return
    before, log = (
        torch.cuda.current_device,
        logging.getLogger("megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp"),
    )
    silent, log.disabled = log.disabled, True
    torch.cuda.current_device = lambda: 0
    try:
        yield
    finally:
        torch.cuda.current_device = before
        log.disabled = silent


def _do_not_reduce(wrapped: Any) -> None:
    """Takes the reduction out where one process holds everything.

    There the wrapper accumulates into the whole gradient buffer and then adds that buffer's own "reduced" copy to it: gradients come out twice as large
    after one micro-batch and worse after more (seen on 0.16.1; at two processes they are exact).
    """
    wrapped.module.grad_reduce_pipeline.reduce_gradients = lambda *args, **kwargs: None


def _short(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _held(policy: PrecisionPolicy) -> PrecisionPolicy:
    """The policy as the optimizer has to see it: what it updates is the wrapper's main copy, which is its own main weight."""
    main = policy.params if policy.main_params_owner == "params" else policy.main_params or DType.FP32
    return dataclasses.replace(policy, params=main, main_params=main, remainders=False)


def _offset(buffer: Any, name: str, parameter: Any) -> tuple[int, ...]:
    """Where this rank's rows of a parameter begin: the wrapper cuts flat buffers, at multiples of a row."""
    original = parameter.orig_param
    group = buffer.parameter_groups[buffer.param_to_param_group[original]]
    held = group.main_weight_buffer or group.model_weight_buffer
    start, _ = held.locate_item_in_global_item(held.param_idx[original])
    row = math.prod(original.shape[1:])  # its storage may be released, so it is not indexed
    return (start // row, *([0] * (original.dim() - 1)))


def _live_buffers(buffer: Any) -> Iterator[Live]:
    """Model weights as they rest between steps, main weights and gradients of every parameter group; shared tensors named once."""
    for group in buffer.parameter_groups:
        for index, parameter in enumerate(group.params):
            name = _short(buffer.param_to_name[parameter])
            for role, held in (
                ("params", group.model_weight_buffer),
                ("main_params", group.main_weight_buffer),
                ("grads", group.main_grad_buffer),
            ):
                if held is not None:
                    yield Live(
                        role=role, parameter=name, tensor=held.get_item(index, only_shard=held.is_data_distributed)
                    )


def _copied_gradients(shards: Mapping[str, torch.Tensor], buffers: Iterable[Live]) -> Iterator[Live]:
    """FP32 copies of 16-bit gradients: FP32 main weights want gradients of their own dtype. Where the buffer is FP32, the optimizer reads it itself."""
    held = {live.tensor.untyped_storage().data_ptr() for live in buffers if live.role == "grads"}
    for name, shard in shards.items():
        if shard.grad is not None and shard.grad.untyped_storage().data_ptr() not in held:
            yield Live(role="main_grads", parameter=name, tensor=shard.grad)
