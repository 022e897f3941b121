"""The FSDP2 engine: torch's fully_shard with a real MixedPrecisionPolicy around megatron-core's GPTModel, on CUDA or CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mpbridge.backend.engines.base import ShardedEngine
from mpbridge.backend.engines.contract import Batch, Live, StepResult
from mpbridge.backend.engines.fsdp2_traits import TRAITS
from mpbridge.backend.megatron.inside_optimizer import never_decoupled, update_router_biases

if TYPE_CHECKING:
    from mpbridge.settings.container import Run


class Fsdp2Engine(ShardedEngine):
    """GPTModel in units of fully_shard, stepped by megatron-core's schedule, updated by torch's AdamW or FusedAdam on the local shards."""

    name = TRAITS.name

    def __init__(self, run: Run, *, cuda: bool) -> None:
        super().__init__(run, cuda=cuda)
        self.reduced: Counter[torch.dtype] = Counter()
        """dtype -> gradient elements that went into reduce-scatters so far: the wire traffic, counted at FSDP2's own interface."""

    def _build(self, backend: Any) -> None:
        from megatron.core import parallel_state

        from mpbridge.backend.engines.fsdp2_units import data_mesh, refuse_mixed, shard, store
        from mpbridge.backend.engines.parallel import ModelParallel
        from mpbridge.backend.engines.shard_optimizer import ShardOptimizer
        from mpbridge.backend.models.gpt import fp32_modules, global_names, gpt_model

        self.configs = _targets(self.run, cuda=self.cuda)
        # gradients are never on `decoupled_grad` here
        never_decoupled(self.configs.optimizer)
        self._parallel = ModelParallel(self.run.facts.parallel, seed=int(self.run.train.get("seed", 1234)))
        config, policy = self.configs.model, self.run.policy
        model = gpt_model(config, self.configs.gpt, policy, cuda=self.cuda, backend=backend)
        kept = fp32_modules(model, policy.keep_fp32)
        names = global_names(model)
        refuse_mixed(kept, {id(parameter): names[name] for name, parameter in model.named_parameters()})
        store(model, policy, kept)
        if self.cuda:
            model.cuda(torch.cuda.current_device())
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.reduced = shard(model, policy, data_mesh(group, cuda=self.cuda), kept)
        self.model = [model]
        self.optimizer = ShardOptimizer(
            dict(model.named_parameters()), policy, self.run.facts, self.configs.optimizer, group, cuda=self.cuda
        )
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = _finalize
        if policy.reduce.bytes > policy.params.bytes:
            # gradients of earlier micro-batches then accumulate unsharded in the reduction's dtype; in a shard they would have the storage's
            config.no_sync_func = partial(_unsynced, model)

    def train_step(self, batches: Iterator[Batch], *, microbatches: int) -> StepResult:
        """Forward, backward and update over `microbatches` micro-batches of this data-parallel rank."""
        from mpbridge.backend.engines.steps import learning_rate

        with self._layer():
            self.model[0].train()
            self.optimizer.zero_grad()
            scale, lr = self.optimizer.get_loss_scale(), learning_rate(self.optimizer)
            loss = self._schedule(batches, microbatches, forward_only=False)
            applied, norm = self.optimizer.step()
            return StepResult(loss=loss, applied=applied, grad_norm=norm, loss_scale=scale, lr=lr)

    def _schedule(self, batches: Iterator[Batch], microbatches: int, *, forward_only: bool) -> float:
        loss = super()._schedule(batches, microbatches, forward_only=forward_only)
        if forward_only:
            self.model[0].reshard()  # the root unit otherwise stays gathered for a backward pass that never comes
        return loss

    def tensors(self) -> Iterable[Live]:
        """Every tensor that plays a role, as it exists at this moment: local shards."""
        from mpbridge.backend.engines.shard_state import live_shards

        return live_shards(self.model[0], self.optimizer)


def _targets(run: Run, *, cuda: bool) -> Any:
    from mpbridge.backend.megatron.configs import build_targets, sections

    inputs = sections(run, cuda=cuda)
    # megatron-core 0.16.1 accepts state dtypes only together with its distributed optimizer; nothing else reads the flag here
    inputs["optimizer"]["use_distributed_optimizer"] = bool(run.policy.precision_aware)
    return build_targets(run, cuda=cuda, inputs=inputs)


@contextmanager
def _unsynced(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _finalize(chunks: list[Any], *args: Any, **kwargs: Any) -> None:
    """What remains of megatron-core's finalize_model_grads when only data is parallel: the routers' load-balancing biases."""
    config = chunks[0].config
    if getattr(config, "moe_router_enable_expert_bias", False):
        update_router_biases(chunks, config)
