"""DeepSpeed's ZeRO 3: every parameter is split evenly over the ranks and gathered by the module that reads it; FP32 partitions by sub-group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mpbridge.common.errors import BadValue
from mpbridge.numerics.observation.tensors import sample
from mpbridge.observe.audit.holdings import Held
from mpbridge.observe.audit.replicas import Copies
from mpbridge.observe.witnessing.deepspeed import DeepSpeedLoop
from mpbridge.observe.witnessing.plain import FSDP, Owned


@dataclass(frozen=True, slots=True)
class _Part:
    """This rank's part of one parameter."""

    parameter: Any
    group: int
    """Index of the sub-group, which has one flat FP32 partition."""
    start: int
    """First element in that partition."""
    count: int
    """Elements here, without padding."""
    begin: int
    """First element in the whole parameter, flat."""

    @property
    def whole(self) -> int:
        return int(self.parameter.ds_numel)

    @property
    def stored(self) -> torch.Tensor:
        """What the forward pass gathers."""
        own: torch.Tensor = self.parameter.ds_tensor.detach()
        return own.reshape(-1)[: self.count]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """This part of a tensor that is as long as the partition."""
        return flat[self.start : self.start + self.count]


class Zero3Loop(DeepSpeedLoop):
    """Sharded parameters, gradients and states."""

    kind = replace(
        FSDP,
        name="zero3",
        summary="DeepSpeed's ZeRO 3",
        label="DeepSpeed ZeRO 3",
        layout="even",
        main_weights="wrapper",
    )
    name = "zero3"
    sharded = "everything"

    def __init__(self, model: Any, optimizer: Any, *, scaler: Any = None, group: Any = None) -> None:
        flat: list[torch.Tensor] = list(optimizer.fp32_partitioned_groups_flat)
        if not all(one.numel() for one in flat):
            raise BadValue(
                "witness() got DeepSpeed's ZeRO 3 with states on NVMe, which cannot be observed: use states on CPU or GPU"
            )
        super().__init__(model, optimizer, flat, scaler=scaler, group=group)

    # --- who keeps what ------------------------------------------------------------------------------------------------------------------
    def _parts(self) -> dict[str, _Part]:
        outer: Any = self.outer
        found = {}
        for name, parameter in self.named_parameters():
            place = outer.grad_position.get(outer.get_param_id(parameter)) if parameter.requires_grad else None
            if place is None:
                continue
            size = int(parameter.ds_tensor.ds_numel)
            begin = size * int(outer._get_param_partition_rank(parameter))
            count = max(0, min(size, int(parameter.ds_numel) - begin))
            found[name] = _Part(parameter=parameter, group=place[0], start=place[1], count=count, begin=begin)
        return found

    def _by_partition(self, number: int) -> Owned:
        """The optimizer's parameter group of a sub-group: DeepSpeed puts each partition into it only while updating it."""
        inner = self.inner[0]
        return Owned(inner, inner.param_groups[self.outer.sub_group_to_group_id[number]])

    def audit_holdings(self) -> Iterator[Held]:
        """Every parameter with the piece of the FP32 partition that this rank updates for it."""
        parts = self._parts()
        for name, parameter in self.named_parameters():
            part = parts.get(name)
            if part is None:
                yield Held(name=name, parameter=parameter, elements=int(parameter.ds_numel))
                continue
            flat, mine = self._flat[part.group], self._by_partition(part.group)
            state = dict(mine.inner.state.get(flat, {}))
            yield Held(
                name=name,
                parameter=parameter,
                part=part.stored,
                updated=part.of(flat),
                begin=part.begin,
                elements=part.whole,
                inner=mine.inner,
                group=mine.group,
                state={key: part.of(value) if _like(value, flat) else value for key, value in state.items()},
                samples=self._samples.get(name),
            )

    def audit_copies(self, read: Mapping[str, int] | None) -> Copies:
        """Part sizes, and digests of what the forward pass read."""
        seen = Copies(shards={name: (part.count, part.whole) for name, part in self._parts().items()})
        for name in seen.shards:
            if read is not None and name in read:
                seen.whole[name, 0, 0] = read[name]
        return seen

    def _size(self, name: str, parameter: Any) -> int:
        return int(parameter.ds_numel)

    # --- the update ----------------------------------------------------------------------------------------------------------------------
    def _stored(self, held: Held) -> torch.Tensor:
        own: torch.Tensor = held.parameter.ds_tensor.detach() if held.part is None else held.part
        return own

    def _accumulated(self) -> None:
        """The accumulated gradients before the step begins: one piece for each parameter of a sub-group, in order."""
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        for number, pieces in dict(self.outer.averaged_gradients).items():
            for parameter, piece in zip(self.outer.fp16_groups[number], pieces or (), strict=False):
                self._grads[names[id(parameter)]] = int(piece.numel()), piece.dtype

    def _reading(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """During the inner optimizer's step: the partition whose gradient exists now."""
        for name, part in self._parts().items():
            grad = self._flat[part.group].grad
            if grad is None or not part.count:
                continue
            mine = part.of(grad.detach())
            self._note(name, mine)
            self._samples[name] = sample(mine, part.begin, part.whole)


def _like(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == flat.shape
