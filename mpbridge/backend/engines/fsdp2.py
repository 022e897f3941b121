"""The FSDP2 engine: torch's fully_shard with a real MixedPrecisionPolicy around megatron-core's GPTModel, on CUDA or CPU."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls

from mpbridge.backend.engines.base import ShardedEngine
from mpbridge.backend.engines.contract import Batch, Live
from mpbridge.backend.engines.fsdp2_traits import TRAITS
from mpbridge.backend.engines.parallel import ModelParallel
from mpbridge.backend.engines.shard_optimizer import ShardOptimizer
from mpbridge.backend.engines.shard_state import live_shards
from mpbridge.backend.megatron.inside_optimizer import never_decoupled, update_router_biases
from mpbridge.backend.megatron.targets import build_targets, sections
from mpbridge.common.errors import BadValue, Refused
from mpbridge.common.formats import DType
from mpbridge.precision.policy import PrecisionPolicy


class Fsdp2Engine(ShardedEngine):
    """GPTModel in units of fully_shard, stepped by megatron-core's schedule, updated by torch's AdamW or FusedAdam on the local shards."""

    name = TRAITS.name

    def _build(self, backend: Any) -> None:
        from megatron.core import parallel_state

        from mpbridge.backend.models.gpt import fp32_modules, global_names, gpt_model

        if not hasattr(torch.cpu.Stream, "record_event"):
            # on a GPU it may run there, but no test of it has
            raise Refused(
                f"engine=fsdp2 needs a torch whose FSDP2 runs on a CPU (2.13 and 2.15 do, 2.6 does not), found {torch.__version__}: "
                "install a newer torch, or use another engine"
            )
        inputs = sections(self.run, cuda=self.cuda)
        # megatron-core 0.16.1 accepts state dtypes only together with its distributed optimizer; nothing else reads the flag here
        inputs["optimizer"]["use_distributed_optimizer"] = bool(self.run.policy.precision_aware)
        self.configs = build_targets(self.run, cuda=self.cuda, inputs=inputs)
        # gradients are never on `decoupled_grad` here
        never_decoupled(self.configs.optimizer)
        self._parallel = ModelParallel(self.run.facts.parallel, seed=self.run.train["seed"])
        config, policy = self.configs.model, self.run.policy
        model = gpt_model(config, self.configs.gpt, policy, cuda=self.cuda, backend=backend)
        kept = fp32_modules(model, policy.keep_fp32)
        names = global_names(model)
        refuse_mixed(kept, {id(parameter): names[name] for name, parameter in model.named_parameters()})
        store(model, policy, kept)
        if self.cuda:
            model.cuda(torch.cuda.current_device())
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        mesh = DeviceMesh.from_group(group, "cuda" if self.cuda else "cpu", mesh_dim_names=("shard",))
        shard(model, policy, mesh, kept)
        self.model = [model]
        self.optimizer = ShardOptimizer(
            dict(model.named_parameters()), policy, self.run.facts, self.configs.optimizer, group, cuda=self.cuda
        )
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = _finalize
        if policy.reduce.bytes > policy.params.bytes:
            # gradients of earlier micro-batches then accumulate unsharded in the reduction's dtype; in a shard they would have the storage's
            config.no_sync_func = partial(_unsynced, model)

    def _schedule(self, batches: Iterator[Batch], microbatches: int, *, forward_only: bool) -> float:
        loss = super()._schedule(batches, microbatches, forward_only=forward_only)
        if forward_only:
            self.model[0].reshard()  # the root unit otherwise stays gathered for a backward pass that never comes
        return loss

    def tensors(self) -> Iterable[Live]:
        """Every tensor that plays a role, as it exists at this moment: local shards."""
        return live_shards(self.model[0], self.optimizer)


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


# --- units: which modules form one, and its MixedPrecisionPolicy ----------------------------------------------------------------------------
def refuse_mixed(kept: Mapping[torch.nn.Module, list[str]], names: Mapping[int, str]) -> None:
    """Raises BadValue for modules of which `keep_fp32` names some parameters but not others: a unit has one compute dtype."""
    faults = []
    for module, own in kept.items():
        rest = [name for name, _ in module.named_parameters(recurse=False) if name not in own]
        if rest:
            said = ", ".join(names[id(getattr(module, name))] for name in own)
            left = ", ".join(names[id(getattr(module, name))] for name in rest)
            faults.append(f"keep_fp32 names {said} and leaves {left} of the same module: name both or neither")
    if faults:
        raise BadValue("; ".join(faults))


def store(model: torch.nn.Module, policy: PrecisionPolicy, kept: Mapping[torch.nn.Module, list[str]]) -> None:
    """Gives every parameter its resident dtype: the policy's, FP32 for those in `kept`. Buffers stay as megatron-core made them."""
    wide = {id(getattr(module, name)) for module, own in kept.items() for name in own}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32 if id(parameter) in wide else policy.params.torch())


def _allow(kind: type[Any]) -> None:
    """Lets fully_shard accept modules of a class with an abstract base (megatron-core's routers).

    fully_shard gives a module a class with FSDPModule in front of its own. CPython then refuses the assignment, since the two classes have different
    object layouts. With FSDPModule behind the module's own class it is accepted, and torch looks into this table before it makes a class.
    """
    if issubclass(kind, ABC):
        cls_to_fsdp_cls.setdefault(kind, type(f"FSDP{kind.__name__}", (kind, FSDPModule), {}))


def shard(model: Any, policy: PrecisionPolicy, mesh: DeviceMesh, kept: Mapping[torch.nn.Module, list[str]]) -> None:
    """Shards in place: modules kept in FP32, then each layer, then the rest."""
    wide = torch.float32
    # inputs are not cast on entry: they are already in the compute dtype, and rotary angles must stay FP32 until their cosine is taken (a position of
    # 1000 rounds to a multiple of 4 in BF16)
    of_layer = MixedPrecisionPolicy(
        param_dtype=policy.compute.torch(), reduce_dtype=policy.reduce.torch(), output_dtype=policy.output.torch(), cast_forward_inputs=False
    )  # fmt: skip
    # a kept module's output is cast for the BF16 modules that follow
    of_kept = replace(of_layer, param_dtype=wide, reduce_dtype=wide, cast_forward_inputs=True)
    # the model's output is FP32, as in megatron-core's Float16Module: a loss in BF16 has three digits
    of_root = replace(of_layer, output_dtype=wide)
    apart = [] if policy.compute is DType.FP32 else list(kept)
    for module in apart:
        _allow(type(module))
    plan = [(module, of_kept) for module in apart] + [(layer, of_layer) for layer in model.decoder.layers]
    for module, how in (*plan, (model, of_root)):
        fully_shard(module, mesh=mesh, mp_policy=how)
