"""Loops around megatron-core's optimizers whose wrapper shards parameters: Megatron-FSDP, and torch's `fully_shard` (Megatron-LM's --use-torch-fsdp2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from mpbridge.backend.engines.contract import Live
from mpbridge.backend.megatron import inside_fsdp
from mpbridge.backend.megatron.inside_optimizer import main_weights
from mpbridge.common.traits import traits
from mpbridge.interop.stacks.meaning import Sharded
from mpbridge.numerics.observation.tensors import local
from mpbridge.observe.audit.holdings import Held
from mpbridge.observe.audit.replicas import Copies
from mpbridge.observe.audit.traffic import Traffic, elements_into
from mpbridge.observe.audit.watch import Watch
from mpbridge.observe.witnessing.core import CoreLoop, around_call
from mpbridge.observe.witnessing.loops import Update, together
from mpbridge.observe.witnessing.plain import FSDP, NOBODY, Owned, copies_of, states
from mpbridge.observe.witnessing.sharded import first_element, row_of


class _Sharded(CoreLoop):
    """Parameters sharded over the data-parallel ranks; gradients are copied into one buffer before they are sent."""

    def audit_copies(self, read: Mapping[str, int] | None) -> Copies:
        """Shard sizes, and digests of what the forward pass read."""
        named = self.named_parameters()
        return copies_of({name: (int(local(one).numel()), int(one.numel())) for name, one in named}, read)

    def audit_traffic(self, promised: dict[str, set[str]], watch: Watch, microbatches: int) -> Traffic:
        """Messages checked by number of elements."""
        group = self.audit_ranks()
        seen = Traffic(ranks=len(group), promised=promised)
        sizes = [int(parameter.numel()) for _, parameter in self.named_parameters()]
        elements_into(seen, watch, group, sizes, times={1, max(1, microbatches)})
        return seen


class CoreFsdpLoop(_Sharded):
    """Megatron-FSDP: the wrapper shards parameters and owns the main weights."""

    kind = traits("megatron_fsdp")
    name = "megatron_fsdp"

    @property
    def sharded(self) -> Sharded:  # type: ignore[override]
        """What is sharded, from the wrapper's strategy."""
        strategy = str(getattr(getattr(self.model[0], "ddp_config", None), "data_parallel_sharding_strategy", ""))
        known: Mapping[str, Sharded] = {"no_shard": "nothing", "optim": "optimizer", "optim_grads": "gradients"}
        return known.get(strategy, "everything")

    def named_parameters(self) -> list[tuple[str, Any]]:
        """The sharded parameters that the optimizer updates."""
        return list(inside_fsdp.parameters(self.model[0]).items())

    def audit_holdings(self) -> Iterator[Held]:
        """Main shards and the model's own weights."""
        owned = {
            id(parameter): Owned(part.optimizer, group)
            for part in self._parts()
            for group in part.optimizer.param_groups
            for parameter in group["params"]
        }
        resting = {name: tensor for role, name, tensor in inside_fsdp.held(self.model[0]) if role == "params"}
        for name, parameter in self.named_parameters():
            mine = owned.get(id(parameter), NOBODY)
            shard = parameter._local_tensor if hasattr(parameter, "_local_tensor") else parameter
            yield Held(
                name=name,
                parameter=parameter,
                part=resting.get(name, shard.detach()).reshape(-1),
                updated=parameter,
                begin=inside_fsdp.offset(self.model[0], name, parameter)[0] * row_of(parameter),
                inner=mine.inner,
                group=mine.group,
                state=mine.state(parameter),
            )

    def tensors(self) -> Iterator[Live]:  # type: ignore[override]
        """The wrapper's buffers and the optimizer's states."""
        buffers = [
            Live(role=role, parameter=name, tensor=tensor) for role, name, tensor in inside_fsdp.held(self.model[0])
        ]
        yield from buffers
        held_in = {one.tensor.untyped_storage().data_ptr() for one in buffers if one.role == "grads"}
        for held in self.audit_holdings():
            grad = getattr(held.updated, "grad", None)
            inner = getattr(grad, "_local_tensor", grad)
            if inner is not None and inner.untyped_storage().data_ptr() not in held_in:
                yield Live(role="main_grads", parameter=held.name, tensor=inner)
            yield from states(held)


class CoreFsdp2Loop(_Sharded):
    """torch's `fully_shard` under megatron-core's Float16 optimizer: 16-bit shards, with FP32 copies that have their own gradients."""

    kind = replace(
        FSDP, name="core_fsdp2", summary="megatron-core's TorchFullyShardedDataParallel", main_weights="megatron_core"
    )
    name = "core_fsdp2"
    sharded: Sharded = "everything"

    def __init__(self, model: Any, optimizer: Any, *, scaler: Any = None, group: Any = None) -> None:
        self._grads: dict[str, torch.Tensor] = {}
        super().__init__(model, optimizer, scaler=scaler, group=group)
        # it has its own config class, without precision fields
        self.configs.ddp = None

    @property
    def wrapper(self) -> str:
        """What reduces gradients."""
        return "megatron-core's TorchFullyShardedDataParallel"

    def audit_holdings(self) -> Iterator[Held]:
        """Every shard with its FP32 copy."""
        owned = {id(model): (part, main) for part in self._parts() for model, main in main_weights(part)}
        for name, parameter in self.named_parameters():
            part, main = owned.get(id(parameter), (None, None))
            inner = None if part is None else part.optimizer
            groups = [] if inner is None else inner.param_groups
            yield Held(
                name=name,
                parameter=parameter,
                part=local(parameter).detach().reshape(-1),
                updated=main,
                begin=first_element(name, parameter),
                inner=inner,
                group=next((group for group in groups if any(one is main for one in group["params"])), None),
                state={} if inner is None else dict(inner.state.get(main, {})),
            )

    def tensors(self) -> Iterator[Live]:  # type: ignore[override]
        """Shards, and the model's gradients as they were before megatron-core's step, which frees them."""
        for held in self.audit_holdings():
            yield Live(role="params", parameter=held.name, tensor=held.parameter.detach())
            if held.name in self._grads:
                yield Live(role="grads", parameter=held.name, tensor=self._grads[held.name])
            if held.updated is None:
                continue
            if held.updated is not held.parameter:
                yield Live(role="main_params", parameter=held.name, tensor=held.updated.detach())
                if held.updated.grad is not None:
                    yield Live(role="main_grads", parameter=held.name, tensor=held.updated.grad)
            yield from states(held)
        for chunk in self.model:
            for name, buffer in chunk.named_buffers():
                yield Live(role="buffers", parameter=inside_fsdp.bare_name(name), tensor=buffer)

    def on_update(self, then: Callable[[Update], None]) -> Callable[[], None]:
        """As for other megatron-core optimizers, but first records the gradients that it is about to copy."""
        self._grads = {}
        return together(around_call(self.outer, "step", before=self._accumulated), super().on_update(then))

    def _accumulated(self) -> None:
        """The accumulated gradients, without keeping them."""
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                grad = local(parameter.grad)
                self._grads[name] = torch.empty(grad.shape, dtype=grad.dtype, device="meta")
