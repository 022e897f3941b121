"""DeepSpeed's ZeRO 1, 2 and 3, its BF16 optimizer and those without ZeRO: FP32 copies, mostly flat, stepped through engine.step(), gradients that are freed within the step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mpbridge.backend.engines.contract import Live
from mpbridge.common.errors import BadValue
from mpbridge.interop.stacks.meaning import Sharded
from mpbridge.numerics.observation.tensors import sample
from mpbridge.observe.audit.holdings import Held
from mpbridge.observe.audit.replicas import Copies
from mpbridge.observe.witnessing.core import around_call
from mpbridge.observe.witnessing.loops import Update, together
from mpbridge.observe.witnessing.plain import DDP, FSDP, NOBODY, Owned, TorchLoop, copies_of, cut_states, states
from mpbridge.planning.memory.keeps import STATES


class DeepSpeedLoop(TorchLoop):
    """DeepSpeed's engine around a module, stepped through `engine.step()`."""

    def __init__(
        self, model: Any, optimizer: Any, flat: list[torch.Tensor], *, scaler: Any = None, group: Any = None
    ) -> None:
        """flat: the FP32 partitions that this rank updates."""
        self._flat = flat
        self._samples: dict[str, dict[int, float]] = {}
        self._grads: dict[str, tuple[int, torch.dtype]] = {}
        self._read: dict[str, tuple[int, torch.dtype]] = {}
        super().__init__(model, optimizer, scaler=scaler, group=group)
        limit = getattr(optimizer, "clip_grad", None)
        if limit is not None:
            self.configs.optimizer = SimpleNamespace(clip_grad=float(limit))

    @property
    def wrapper(self) -> str:
        """What reduces gradients."""
        return f"DeepSpeed {type(self.outer).__name__}"

    @property
    def loss_scale(self) -> float:
        """DeepSpeed's own loss scale."""
        return float(getattr(self.outer, "loss_scale", 1.0) or 1.0)

    def tensors(self) -> Iterator[Live]:
        """The live tensors as DeepSpeed has them; gradients, which it frees within its step, as they were during it."""
        for held in self.audit_holdings():
            yield Live(role="params", parameter=held.name, tensor=self._stored(held))
            for role, seen in (("grads", self._grads), ("main_grads", self._read)):
                if held.name in seen:
                    count, dtype = seen[held.name]
                    yield Live(role=role, parameter=held.name, tensor=torch.empty(count, dtype=dtype, device="meta"))
            if held.main is not None:
                yield Live(role="main_params", parameter=held.name, tensor=held.main)
            yield from states(held)
        yield from self._buffers()

    def on_update(self, then: Callable[[Update], None]) -> Callable[[], None]:
        """Hooks in after DeepSpeed's own `step`; gradients are recorded before it, and inside it when the inner optimizer reads them."""

        def stepped(result: Any) -> None:
            norm = getattr(self.outer, "_global_grad_norm", None)
            then(Update(applied=not getattr(self.outer, "overflow", False), norm=None if norm is None else float(norm)))

        self._samples, self._grads, self._read = {}, {}, {}
        inside = [inner.register_step_post_hook(self._reading).remove for inner in self.inner]
        return together(around_call(self.outer, "step", before=self._accumulated, after=stepped), *inside)

    @abstractmethod
    def _stored(self, held: Held) -> torch.Tensor:
        """This rank's part of a parameter between steps."""

    @abstractmethod
    def _accumulated(self) -> None:
        """Records the accumulated gradients before the step begins."""

    @abstractmethod
    def _reading(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Records the gradients that the inner optimizer reads while it steps."""

    def _note(self, name: str, mine: torch.Tensor) -> None:
        """Records a gradient that the inner optimizer reads; if it has the accumulator's dtype, it is the accumulator."""
        if name in self._grads and self._grads[name][1] is not mine.dtype:
            self._read[name] = int(mine.numel()), mine.dtype


class UnshardedLoop(DeepSpeedLoop):
    """Without ZeRO: a FP32 copy of each parameter (`FP16_UnfusedOptimizer`), or of all of a group in one flat tensor (`FP16_Optimizer`)."""

    kind = replace(
        DDP,
        name="deepspeed",
        summary="DeepSpeed without ZeRO",
        label="DeepSpeed",
        distributed_optimizer="never",
        main_weights="wrapper",
    )
    name = "deepspeed"

    def __init__(self, model: Any, optimizer: Any, *, scaler: Any = None, group: Any = None) -> None:
        self._main: dict[int, tuple[torch.Tensor, slice]] = {}
        """Parameter, by identity -> (what the inner optimizer updates, its place in that)."""
        flat: list[torch.Tensor] = list(getattr(optimizer, "fp32_groups_flat", ()))
        for number, group_of in enumerate(optimizer.fp16_groups):
            begin = 0
            for place, parameter in enumerate(group_of):
                count = int(parameter.numel())
                own = flat[number] if flat else optimizer.fp32_groups[number][place]
                self._main[id(parameter)] = own, slice(begin, begin + count)
                begin += count if flat else 0
        super().__init__(model, optimizer, flat, scaler=scaler, group=group)

    def audit_holdings(self) -> Iterator[Held]:
        """Every parameter with its FP32 copy."""
        owned = self._owned()
        for name, parameter in self.named_parameters():
            if id(parameter) not in self._main:
                yield Held(name=name, parameter=parameter)
                continue
            whole, where = self._main[id(parameter)]
            mine = owned.get(id(whole), NOBODY)
            yield Held(
                name=name,
                parameter=parameter,
                part=parameter.detach().reshape(-1),
                updated=whole.detach().reshape(-1)[where],
                inner=mine.inner,
                group=mine.group,
                state=cut_states(mine.state(whole), whole, lambda one, where=where: one.reshape(-1)[where]),  # type: ignore[misc]
                samples=self._samples.get(name),
            )

    def _stored(self, held: Held) -> torch.Tensor:
        own: torch.Tensor = held.parameter.detach()
        return own

    def _accumulated(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                self._grads[name] = int(parameter.grad.numel()), parameter.grad.dtype

    def _reading(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for name, parameter in self.named_parameters():
            whole, where = self._main.get(id(parameter), (None, slice(0)))
            if whole is not None and whole.grad is not None:
                mine = whole.grad.detach().reshape(-1)[where]
                self._note(name, mine)
                self._samples[name] = sample(mine, 0, int(parameter.numel()))


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
                f"witness() got DeepSpeed's {type(optimizer).__name__}: it has no FP32 copy of the weights that is known, unlike ZeRO 1 to 3 and its "
                "optimizers without ZeRO"
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
            mine = owned.get(id(flat), NOBODY)
            yield Held(
                name=name,
                parameter=parameter,
                part=parameter.detach().reshape(-1)[start : start + count],
                updated=mapping.hp_fragment,
                begin=int(start),
                inner=mine.inner,
                group=mine.group,
                state=cut_states(mine.state(flat), flat, itemgetter(slice(where.start, where.start + where.numel))),
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
            ranked = getattr(outer, "_get_param_partition_rank", None)  # releases before 0.19 shard over one group
            begin = size * int(dist.get_rank(outer.dp_process_group) if ranked is None else ranked(parameter))
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
            yield Held(
                name=name,
                parameter=parameter,
                part=part.stored,
                updated=part.of(flat),
                begin=part.begin,
                elements=part.whole,
                inner=mine.inner,
                group=mine.group,
                state=cut_states(mine.state(flat), flat, part.of),
                samples=self._samples.get(name),
            )

    def audit_copies(self, read: Mapping[str, int] | None) -> Copies:
        """Part sizes, and digests of what the forward pass read."""
        return copies_of({name: (part.count, part.whole) for name, part in self._parts().items()}, read)

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
