"""The Megatron-FSDP engine: megatron-core's own fully sharded wrapper, with one copy of main weights and one of gradients."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mpbridge.backend.engines.base import ShardedEngine
from mpbridge.backend.engines.contract import Live
from mpbridge.backend.engines.megatron_fsdp_traits import TRAITS
from mpbridge.backend.engines.parallel import ModelParallel
from mpbridge.backend.engines.shard_optimizer import ShardOptimizer
from mpbridge.backend.engines.shard_state import live_states
from mpbridge.backend.megatron import inside_fsdp as inside
from mpbridge.backend.megatron.inside_optimizer import never_decoupled
from mpbridge.backend.megatron.targets import build_targets, sections

if TYPE_CHECKING:
    from mpbridge.settings.container import Run

log = logging.getLogger("mpbridge")


class MegatronFsdpEngine(ShardedEngine):
    """GPTModel in Float16Module in FullyShardedDataParallel, updated by torch's AdamW or FusedAdam on the wrapper's own shards.

    megatron-core 0.16.1's optimizer factory is not used here: with a precision-aware optimizer it passes `use_decoupled_grad` to FusedAdam while the wrapper
    puts gradients on `.grad`, so no weight is ever updated; and FusedAdam keeps a second copy of main weights. (Megatron-LM PRs 4024, 3746, 4133 and 4427.)
    """

    name = TRAITS.name

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        with self._layer(), inside.indexed_device(self.cuda):
            yield

    def _build(self, backend: Any) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads

        from mpbridge.backend.models.gpt import build_chunks

        run = self.run
        self.configs = build_targets(run, cuda=self.cuda, inputs=_sections(run, cuda=self.cuda))
        self._parallel = ModelParallel(run.facts.parallel, seed=run.train["seed"])
        config = self.configs.model
        (chunk,) = build_chunks(config, self.configs.gpt, run.policy, cuda=self.cuda, backend=backend)
        with inside.indexed_device(self.cuda):
            wrapped = inside.wrap(config, self.configs.ddp, chunk, self._device)
        self.model = [wrapped]
        # nothing puts gradients on `decoupled_grad` here, so no optimizer may read them there
        never_decoupled(self.configs.optimizer)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if group.size() == 1:
            inside.do_not_reduce(wrapped)
        made = (inside.parameters(wrapped), run.policy, run.facts, self.configs.optimizer, group)
        self.optimizer = ShardOptimizer(*made, cuda=self.cuda, offset=partial(inside.offset, wrapped))
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if self.configs.ddp.data_parallel_sharding_strategy != "optim":
            # under no_sync, 0.16.1 reduces ZeRO-1's gradients after backward and again in finish_grad_sync: the result is 2/N of the mean, which is right
            # for two processes only (observed with four); without it they are reduced once
            config.no_sync_func = wrapped.no_sync

    def _zero_grad(self) -> None:
        self.model[0].train()
        self.model[0].zero_grad_buffer()

    def _update(self) -> tuple[bool, float | None]:
        found = super()._update()
        self._install()
        return found

    def _install(self) -> None:
        """Copies main weights into the model's weights and starts the first gather."""
        inside.install_main_weights(self.model[0])
        self.model[0].start_param_sync()
        if not self.cuda:  # gloo's threads would otherwise write into freed memory
            inside.settle(self.model[0])

    def close(self) -> None:
        """Frees tensors and megatron-core's process-wide parallel state, after waiting for gathers in flight."""
        if self.model and not self.cuda:
            with self._stepping():
                inside.settle(self.model[0])
        for wrapped in self.model:
            inside.release(wrapped)
        super().close()

    def tensors(self) -> Iterable[Live]:
        """Every tensor that plays a role, as it exists at this moment: the wrapper's buffers and the optimizer's states, local shards."""
        buffers = [Live(role=role, parameter=name, tensor=tensor) for role, name, tensor in inside.held(self.model[0])]
        yield from buffers
        yield from _copied_gradients(self.optimizer.shards, buffers)
        yield from live_states(self.optimizer)
        for name, buffer in self.model[0].named_buffers():
            yield Live(role="buffers", parameter=inside.bare_name(name), tensor=buffer)

    def load_state(self, state: Mapping[str, Any], *, optimizer: bool = True) -> None:
        """Loads what `state` returned; optimizer=False: weights only."""
        super().load_state(state, optimizer=optimizer)
        with self._stepping():
            self._install()


def _sections(run: Run, *, cuda: bool) -> dict[str, Any]:
    """The run's inputs with the wrapper's requirements: the distributed optimizer's flag, and no NCCL-only reduction on gloo."""
    inputs: dict[str, Any] = sections(run, cuda=cuda)
    if not run.inputs["ddp"].get("use_distributed_optimizer"):
        log.info("Megatron-FSDP shards optimizer states: ddp.use_distributed_optimizer is on")
    inputs["ddp"] |= {"use_megatron_fsdp": True, "use_distributed_optimizer": True}
    inputs["optimizer"]["use_distributed_optimizer"] = True
    if not cuda:
        # the fused multiply is NCCL's PREMUL_SUM
        inputs["ddp"]["gradient_reduce_div_fusion"] = False
    return inputs


def _copied_gradients(shards: Mapping[str, torch.Tensor], buffers: Iterable[Live]) -> Iterator[Live]:
    """FP32 copies of 16-bit gradients: FP32 main weights need FP32 gradients. If the buffer is FP32, the optimizer reads it directly and there is no copy."""
    held = {live.tensor.untyped_storage().data_ptr() for live in buffers if live.role == "grads"}
    for name, shard in shards.items():
        if shard.grad is not None and shard.grad.untyped_storage().data_ptr() not in held:
            yield Live(role="main_grads", parameter=name, tensor=shard.grad)
