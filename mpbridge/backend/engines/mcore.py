"""The megatron-core engine: DistributedDataParallel with or without the distributed optimizer, on CUDA or the CPU device layer."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from mpbridge.backend.engines.base import BaseEngine, keep_moments, update
from mpbridge.backend.engines.contract import Batch, Live
from mpbridge.backend.engines.mcore_traits import TRAITS
from mpbridge.backend.engines.optimizers import follow
from mpbridge.backend.engines.parallel import ModelParallel, on_every_chunk
from mpbridge.backend.megatron.inside_optimizer import (
    counted_gradients,
    emerging,
    factors_stored,
    gather_mxfp8,
    gather_now,
    in_order,
    main_weights,
    number_states,
    padded,
    parts,
    read_in_place_of,
    refresh_mxfp8,
)
from mpbridge.backend.megatron.sharded import layer_by_layer
from mpbridge.backend.megatron.targets import build_targets
from mpbridge.backend.models.gpt import build_chunks, global_names
from mpbridge.common.facts import BESIDE_ADAM, STATE_ROLES
from mpbridge.planning.memory.layers import frozen_apart


class McoreEngine(BaseEngine):
    """GPTModel, Float16Module, DistributedDataParallel and megatron-core's optimizer, stepped by its own schedules."""

    name = TRAITS.name

    def _build(self, backend: Any) -> None:
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.optimizer import get_megatron_optimizer

        targets = build_targets(self.run, cuda=self.cuda)
        instances = targets.ddp.num_distributed_optimizer_instances
        self._parallel = ModelParallel(
            self.run.facts.parallel, seed=self.run.train["seed"], optimizer_instances=instances
        )
        shape = self.run.facts.shape
        chunks = build_chunks(targets.model, targets.gpt, self.run.policy, cuda=self.cuda, backend=backend, shape=shape)
        self.model = [
            padded(DistributedDataParallel(targets.model, targets.ddp, chunk, disable_bucketing=i > 0))
            for i, chunk in enumerate(chunks)
        ]
        made = emerging if self.run.facts.optimizer.name in BESIDE_ADAM else get_megatron_optimizer
        self.optimizer = made(targets.optimizer, self.model)
        number_states(self.optimizer)
        keep_moments(self.optimizer, self.run.policy)
        self.configs = targets
        self._hook_up()

    def _hook_up(self) -> None:
        """Sets the functions that the schedules call: loss scaling, gradient finalisation, and the communication that overlaps with compute."""
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads

        config, ddp = self.configs.model, self.configs.ddp
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if ddp.overlap_grad_reduce:
            config.no_sync_func = on_every_chunk([chunk.no_sync for chunk in self.model])
            if len(self.model) > 1:
                config.grad_sync_func = on_every_chunk([chunk.start_grad_sync for chunk in self.model])
        if ddp.overlap_param_gather and ddp.align_param_gather:
            config.param_sync_func = on_every_chunk([chunk.start_param_sync for chunk in self.model])

    def _update(self) -> tuple[bool, float | None]:
        return update(self.optimizer)

    def counted_gradients(self) -> list[tuple[str, torch.Tensor]]:
        """See Engine: of a sharded gradient this rank's part, flat."""
        return list(counted_gradients(self.optimizer, self.named_parameters()))

    def _zero_grad(self) -> None:
        for chunk in self.model:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self._through_gradients:
            # MXFP8 parameters are gathered through the gradient buffer, which has just been zeroed
            gather_mxfp8(self.optimizer)

    @property
    def _through_gradients(self) -> bool:
        """Whether the forward pass gathers parameters through the gradient buffer."""
        return bool(self.configs.optimizer.reuse_grad_buf_for_mxfp8_param_ag and self.configs.ddp.overlap_param_gather)

    def evaluate(self, batches: Iterator[Batch], *, microbatches: int) -> float:
        """As the base class's. Through the gradient buffer, main weights are put there first, or the last gradients would be gathered as weights."""
        if not self._through_gradients:
            return super().evaluate(batches, microbatches=microbatches)
        with self._layer():
            self._zero_grad()
        try:
            return super().evaluate(batches, microbatches=microbatches)
        finally:
            for chunk in self.model:
                for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                    # only a backward pass does: the next forward pass would not gather
                    group.param_gather_dispatched = False

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Parameters of this rank by their global name (layers counted over all pipeline stages, experts over all expert-parallel ranks)."""
        for chunk in self.model:
            yield from parameters(bare(chunk))

    def tensors(self) -> Iterable[Live]:
        """Every tensor that plays a role, as it exists at this moment; views of one buffer share storage (gradients, distributed parameters)."""
        with self._layer():
            self._gather_parameters()
            return live(self.model, self.optimizer)

    def tensors_at_rest(self) -> Iterable[Live]:
        """As `tensors`, without a gather: with overlap_param_gather parameters may be one update old."""
        return live(self.model, self.optimizer)

    def _gather_parameters(self) -> None:
        """Brings the parameters up to date: with overlap_param_gather they are otherwise gathered in the next forward pass."""
        if self._through_gradients:
            refresh_mxfp8(self.model, self.optimizer)
        elif self.configs.ddp.overlap_param_gather:
            gather_now(self.model)

    def state(self, *, loading: bool = False) -> dict[str, Any]:
        """Sharded state dict of model ('model', or 'model0', ... if stages interleave) and 'optimizer', loss scaler included."""
        with self._layer():
            self._gather_parameters()
            allocate_moments(self.optimizer)
            metadata = self._metadata()
            state = {key: bare(chunk).sharded_state_dict(metadata=metadata) for key, chunk in self._chunks().items()}
            parts = state["model"] if len(self.model) == 1 else dict(state)
            with in_order(self.optimizer), factors_stored():
                own = self.optimizer.sharded_state_dict(parts, is_loading=loading, metadata=metadata)
            state["optimizer"] = layer_by_layer(own) if frozen_apart(self.run.policy, self.run.facts) else own
            return state

    def _chunks(self) -> dict[str, Any]:
        """By their keys in a state."""
        return {"model" if len(self.model) == 1 else f"model{i}": chunk for i, chunk in enumerate(self.model)}

    def _metadata(self) -> dict[str, Any]:
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        # fully reshardable: main weights and moments are stored like the model's parameters, so another parallel layout can read them
        sharded = self.configs.ddp.use_distributed_optimizer
        kind = {"distrib_optim_sharding_type": "fully_reshardable"} if sharded else {}
        return {**kind, "dp_cp_group": group, "singleton_local_shards": False, "chained_optim_avoid_prefix": True}

    def load_state(self, state: Mapping[str, Any], *, optimizer: bool = True) -> None:
        """Loads what `state` returned; optimizer=False: weights only, main weights rebuilt from them."""
        with self._layer():
            for key, chunk in self._chunks().items():
                bare(chunk).load_state_dict(state[key], strict=True)
            if optimizer:
                with in_order(self.optimizer):
                    self.optimizer.load_state_dict(state["optimizer"])
            else:
                self.optimizer.reload_model_params()
                forget_main_weights(self.optimizer)


# --- which live tensors of a megatron-core model and optimizer play which role ---------------------------------------------------------------
def bare(chunk: Any) -> Any:
    """The GPTModel inside its wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of a bare model by global name."""
    names = global_names(model)
    for name, parameter in model.named_parameters():
        yield names[name], parameter


def live(chunks: list[Any], optimizer: Any) -> list[Live]:
    """Every tensor that exists at this moment: parameters, buffers, gradients with their buffers' padding, main weights, main gradients, moments."""
    names: dict[torch.Tensor, str] = {}
    found = []
    for chunk in chunks:
        model = bare(chunk)
        for name, parameter in parameters(model):
            names[parameter] = name
            found.append(Live(role="params", parameter=name, tensor=parameter.detach()))
            grad = getattr(parameter, "main_grad", None)
            if grad is not None:
                found.append(Live(role="grads", parameter=name, tensor=grad))
        full = global_names(model)
        found += [Live(role="buffers", parameter=full[name], tensor=buffer) for name, buffer in model.named_buffers()]
        found += _padding(chunk)
    for part in parts(optimizer):
        found += _optimizer_tensors(part, names)
    return found


def _padding(chunk: Any) -> Iterator[Live]:
    """The elements of the distributed optimizer's buffers that belong to no parameter: alignment between parameters and at the end."""
    for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
        ranges = sorted(index[:2] for index in buffer.param_index_map.values())
        for data in (buffer.grad_data, buffer.param_data):
            if data is None:
                continue
            ends = [0, *(end for _, end in ranges)]
            starts = [*(start for start, _ in ranges), data.numel()]
            yield from (
                Live(role="padding", parameter="", tensor=data[a:b]) for a, b in zip(ends, starts, strict=True) if a < b
            )


def _optimizer_tensors(part: Any, names: dict[torch.Tensor, str]) -> Iterable[Live]:
    for parameter, updated in main_weights(part):
        name = names[parameter]
        if updated is not parameter and not _one_storage(updated, parameter):
            yield Live(role="main_params", parameter=name, tensor=updated.detach())
        for attribute in ("decoupled_grad", "grad"):
            grad = getattr(read_in_place_of(part, updated), attribute, None)
            if grad is not None:
                yield Live(role="main_grads", parameter=name, tensor=grad)
        state = part.optimizer.state.get(updated, {})
        for key, role in STATE_ROLES.items():
            if isinstance(state.get(key), torch.Tensor):
                # Transformer Engine's FP8 moments report FP32 as their dtype; their codes are what is stored
                yield Live(role=role, parameter=name, tensor=getattr(state[key], "_data", state[key]))


def _one_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether one is a view of the other, or two quantized weights (wrappers without storage) share the storage of their codes."""
    codes = [getattr(tensor, "_data", None) if hasattr(tensor, "_scale_inv") else tensor for tensor in (first, second)]
    plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in codes)
    return plain and codes[0].untyped_storage().data_ptr() == codes[1].untyped_storage().data_ptr()  # type: ignore[union-attr]


def follow_main_weights(chunks: list[Any], optimizer: Any) -> None:
    """Rounds the loaded main weights into the parameters: a checkpoint of the other realization has weights at rest rounded by another rule.

    Where FusedAdam owns the main weights, or parameters are their own, megatron-core's copy does nothing."""
    for part in parts(optimizer):
        copy = getattr(part, "_copy_main_params_to_model_params", None)
        if copy is not None:
            copy()
    configs = [getattr(chunk, "ddp_config", None) for chunk in chunks]
    through = ("reuse_grad_buf_for_mxfp8_param_ag", "overlap_param_gather")
    if all(getattr(config, name, False) for config in configs for name in through):
        refresh_mxfp8(chunks, optimizer)  # a forced gather would leave weights where the next gradients are added up
        return
    for chunk, config in zip(chunks, configs, strict=True):
        if getattr(config, "use_distributed_optimizer", False):
            gather_now([chunk])


def forget_main_weights(optimizer: Any) -> None:
    """Makes FusedAdam's own main weights follow the parameters again; megatron-core's `reload_model_params` does not update them."""
    for part in parts(optimizer):
        inner = part.optimizer
        if getattr(inner, "master_weights", False):
            for parameter, state in inner.state.items():
                follow(inner, parameter, state.get("master_param"))


def allocate_moments(optimizer: Any) -> None:
    """Gives parameters that were never updated zero moments: a checkpoint without them could not be loaded (for example, if all steps so far overflowed)."""
    for part in parts(optimizer):
        if part.init_state_fn is not None:
            part.init_state_fn(part.optimizer, part.config)
