"""DeepSpeed's ZeRO 1 and 2 (and its BF16 optimizer): 16-bit parameters, one flat FP32 partition of each group on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from mpbridge.audit.holdings import Held
from mpbridge.audit.places import bare
from mpbridge.audit.values import sample
from mpbridge.engines.contract import Live
from mpbridge.errors import BadValue
from mpbridge.stacks.meaning import Sharded
from mpbridge.witnessing.core import after_call, before_call
from mpbridge.witnessing.loops import Update
from mpbridge.witnessing.plain import DDP, TorchLoop, states

_STATES = frozenset({"main_params", "main_grads", "exp_avg", "exp_avg_sq"})


class ZeroLoop(TorchLoop):
    """DeepSpeed's engine around a module, stepped through `engine.step()`."""

    kind = replace(
        DDP,
        name="zero",
        summary="DeepSpeed's ZeRO 1 and 2",
        label="DeepSpeed ZeRO",
        layout="even",
        shards=_STATES,
        distributed_optimizer="always",
        main_weights="wrapper",
    )
    name = "zero"

    def __init__(self, model: Any, optimizer: Any, *, scaler: Any = None, group: Any = None) -> None:
        flat: Any = getattr(optimizer, "single_partition_of_fp32_groups", None)
        self._flat: list[torch.Tensor] = list(flat or getattr(optimizer, "fp32_groups_flat_partition", ()))
        if not self._flat:
            raise BadValue(
                f"witness() got DeepSpeed's {type(optimizer).__name__}: it keeps no flat FP32 partitions (ZeRO 1 and 2 do); ZeRO 3 and "
                "optimizers without a copy of the weights are not observed"
            )
        self._samples: dict[str, dict[int, float]] = {}
        self._grads: dict[str, tuple[int, torch.dtype]] = {}
        self._read: dict[str, tuple[int, torch.dtype]] = {}
        super().__init__(model, optimizer, scaler=scaler, group=group)

    @property
    def wrapper(self) -> str:
        """Who reduces gradients."""
        return f"DeepSpeed {type(self.outer).__name__}"

    @property
    def sharded(self) -> Sharded:  # type: ignore[override]
        """By stage."""
        return "gradients" if getattr(self.outer, "partition_gradients", False) else "optimizer"

    @property
    def loss_scale(self) -> float:
        """DeepSpeed's own."""
        return float(getattr(self.outer, "loss_scale", 1.0) or 1.0)

    def audit_holdings(self) -> Iterator[Held]:
        """Every parameter with the piece of the FP32 partition that this rank updates for it."""
        owned = self._owned()
        for name, parameter in self.named_parameters():
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is None:
                yield Held(name=name, parameter=parameter)
                continue
            flat, where = self._flat[mapping.param_group_index], mapping.hp_fragment_address
            start, count = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
            mine = owned.get(id(flat))
            state = {} if mine is None else dict(mine.inner.state.get(flat, {}))
            yield Held(
                name=name,
                parameter=parameter,
                part=parameter.detach().reshape(-1)[start : start + count],
                updated=mapping.hp_fragment,
                begin=int(start),
                inner=None if mine is None else mine.inner,
                group=None if mine is None else mine.group,
                state={key: _narrowed(value, flat, where) for key, value in state.items()},
                samples=self._samples.get(name),
            )

    def tensors(self) -> Iterator[Live]:
        """As DeepSpeed holds them; gradients, which it frees within its step, as they were then."""
        for held in self.audit_holdings():
            yield Live(role="params", parameter=held.name, tensor=held.parameter.detach())
            for role, seen in (("grads", self._grads), ("main_grads", self._read)):
                if held.name in seen:
                    count, dtype = seen[held.name]
                    yield Live(role=role, parameter=held.name, tensor=torch.empty(count, dtype=dtype, device="meta"))
            if held.updated is not None:
                yield Live(role="main_params", parameter=held.name, tensor=held.updated.detach())
            yield from states(held)
        for chunk in self.model:
            for name, buffer in chunk.named_buffers():
                yield Live(role="buffers", parameter=bare(name), tensor=buffer)

    def on_update(self, then: Callable[[Update], None]) -> Callable[[], None]:
        """Behind DeepSpeed's own `step`; gradients are looked at before it, and inside of it when the inner optimizer reads them."""

        def stepped(result: Any) -> None:
            norm = getattr(self.outer, "_global_grad_norm", None)
            then(Update(applied=not getattr(self.outer, "overflow", False), norm=None if norm is None else float(norm)))

        self._samples, self._grads, self._read = {}, {}, {}
        handles = [inner.register_step_post_hook(self._reading) for inner in self.inner]
        undo = [before_call(self.outer, "step", self._accumulated), after_call(self.outer, "step", stepped)]

        def off() -> None:
            for handle in handles:
                handle.remove()
            for one in reversed(undo):
                one()

        return off

    def _accumulated(self) -> None:
        """What gradients have added up to, before the step begins."""
        wide = dict(self._wide())
        averaged: Mapping[int, Any] = getattr(self.outer, "averaged_gradients", None) or {}
        for name, parameter in self.named_parameters():
            grad = wide.get(id(parameter), getattr(parameter, "grad_accum", None))
            grad = parameter.grad if grad is None else grad
            mapping = getattr(parameter, "_hp_mapping", None)
            if grad is None and mapping is not None and averaged.get(mapping.param_group_index):
                mine = next((one for one in averaged[mapping.param_group_index] if one is not None), None)
                if mine is not None:
                    self._grads[name] = int(mapping.lp_fragment_address.numel), mine.dtype
            elif grad is not None:
                self._grads[name] = int(grad.numel()), grad.dtype

    def _wide(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(id of a parameter, its FP32 accumulator) of the BF16 optimizer, which adds micro-batches up in FP32."""
        held = getattr(self.outer, "fp32_groups_gradients", ())
        for parameters, gradients in zip(getattr(self.outer, "bf16_groups", ()), held, strict=False):
            for parameter, gradient in zip(parameters, gradients, strict=False):
                yield id(parameter), gradient

    def _reading(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """While the inner optimizer steps: partitions whose gradient is there now."""
        for name, parameter in self.named_parameters():
            mapping: Any = getattr(parameter, "_hp_mapping", None)
            grad = None if mapping is None else self._flat[mapping.param_group_index].grad
            if grad is None:
                continue
            where = mapping.hp_fragment_address
            mine = grad.detach()[where.start : where.start + where.numel]
            if name in self._grads and self._grads[name][1] is not mine.dtype:  # else it is the accumulator
                self._read[name] = int(mine.numel()), mine.dtype
            self._samples[name] = sample(mine, int(mapping.lp_fragment_address.start), int(parameter.numel()))


def _narrowed(value: Any, flat: torch.Tensor, where: Any) -> Any:
    whole = isinstance(value, torch.Tensor) and value.shape == flat.shape
    return value[where.start : where.start + where.numel] if whole else value
