"""DeepSpeed's ZeRO 1 and 2 (and its BF16 optimizer): 16-bit parameters, one flat FP32 partition of each group on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from mpbridge.common.errors import BadValue
from mpbridge.interop.stacks.meaning import Sharded
from mpbridge.observe.audit.holdings import Held
from mpbridge.observe.audit.values import sample
from mpbridge.observe.witnessing.deepspeed import DeepSpeedLoop
from mpbridge.observe.witnessing.plain import DDP
from mpbridge.planning.memory.keeps import STATES


class ZeroLoop(DeepSpeedLoop):
    """Whole parameters, sharded states."""

    kind = replace(
        DDP,
        name="zero",
        summary="DeepSpeed's ZeRO 1 and 2",
        label="DeepSpeed ZeRO",
        layout="even",
        shards=frozenset(STATES),
        distributed_optimizer="always",
        main_weights="wrapper",
    )
    name = "zero"

    def __init__(self, model: Any, optimizer: Any, *, scaler: Any = None, group: Any = None) -> None:
        held: Any = getattr(optimizer, "single_partition_of_fp32_groups", None)
        flat: list[torch.Tensor] = list(held or getattr(optimizer, "fp32_groups_flat_partition", ()))
        if not flat:
            raise BadValue(
                f"witness() got DeepSpeed's {type(optimizer).__name__}: it has no flat FP32 partitions, unlike ZeRO 1 to 3; optimizers without a "
                "copy of the weights are not supported"
            )
        super().__init__(model, optimizer, flat, scaler=scaler, group=group)

    @property
    def sharded(self) -> Sharded:  # type: ignore[override]
        """What is sharded, by ZeRO stage."""
        return "gradients" if getattr(self.outer, "partition_gradients", False) else "optimizer"

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

    def _stored(self, held: Held) -> torch.Tensor:
        own: torch.Tensor = held.parameter.detach()
        return own

    def _accumulated(self) -> None:
        """The accumulated gradients before the step begins."""
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
        """(id of a parameter, its FP32 accumulator) of the BF16 optimizer, which accumulates micro-batches in FP32."""
        held = getattr(self.outer, "fp32_groups_gradients", ())
        for parameters, gradients in zip(getattr(self.outer, "bf16_groups", ()), held, strict=False):
            for parameter, gradient in zip(parameters, gradients, strict=False):
                yield id(parameter), gradient

    def _reading(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """During the inner optimizer's step: the partitions whose gradient exists now."""
        for name, parameter in self.named_parameters():
            mapping: Any = getattr(parameter, "_hp_mapping", None)
            grad = None if mapping is None else self._flat[mapping.param_group_index].grad
            if grad is None:
                continue
            where = mapping.hp_fragment_address
            mine = grad.detach()[where.start : where.start + where.numel]
            self._note(name, mine)
            self._samples[name] = sample(mine, int(mapping.lp_fragment_address.start), int(parameter.numel()))


def _narrowed(value: Any, flat: torch.Tensor, where: Any) -> Any:
    whole = isinstance(value, torch.Tensor) and value.shape == flat.shape
    return value[where.start : where.start + where.numel] if whole else value
