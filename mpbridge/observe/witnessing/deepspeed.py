"""DeepSpeed's ZeRO 1, 2 and 3, its BF16 optimizer and those without ZeRO: FP32 copies, mostly flat, stepped through engine.step(), gradients that are freed within the step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
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
from mpbridge.observe.witnessing.plain import DDP, FSDP, NOBODY, Owned, Piece, TorchLoop, copies_of, states
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
    def _pieces(self) -> dict[str, tuple[Piece, Owned]]:
        """Parameter -> (what this rank updates of it in FP32, who does)."""

    @abstractmethod
    def _accumulated(self) -> None:
        """Records the accumulated gradients before the step begins."""

    def audit_holdings(self) -> Iterator[Held]:
        """Every parameter with the part of the FP32 copies that this rank updates for it."""
        pieces = self._pieces()
        for name, parameter in self.named_parameters():
            if name in pieces:
                piece, mine = pieces[name]
                yield piece.held(parameter, mine, samples=self._samples.get(name))
            else:
                yield Held(name=name, parameter=parameter, elements=self._size(name, parameter))

    def _stored(self, held: Held) -> Any:
        """This rank's part of a parameter between steps."""
        return held.parameter.detach()

    def _reading(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Records the gradients that the inner optimizer reads while it steps. One of the accumulator's dtype is the accumulator."""
        for name, (piece, _) in self._pieces().items():
            grad = piece.owner.grad
            if grad is None or not piece.count:
                continue
            mine = piece.of(grad.detach())
            if name in self._grads and self._grads[name][1] is not mine.dtype:
                self._read[name] = int(mine.numel()), mine.dtype
            self._samples[name] = sample(mine, piece.begin, piece.whole)


class UnshardedLoop(DeepSpeedLoop):
    """Without ZeRO: a FP32 copy of each parameter (`FP16_UnfusedOptimizer`), or of all of a group in one flat tensor (`FP16_Optimizer`)."""

    kind = replace(DDP, name="deepspeed", summary="DeepSpeed without ZeRO", label="DeepSpeed", main_weights="wrapper")
    name = "deepspeed"

    def __init__(self, model: Any, optimizer: Any, *, scaler: Any = None, group: Any = None) -> None:
        self._main: dict[int, tuple[torch.Tensor, int]] = {}
        """Parameter, by identity -> (what the inner optimizer updates, its first element in that)."""
        flat: list[torch.Tensor] = list(getattr(optimizer, "fp32_groups_flat", ()))
        for number, group_of in enumerate(optimizer.fp16_groups):
            begin = 0
            for place, parameter in enumerate(group_of):
                own = flat[number] if flat else optimizer.fp32_groups[number][place]
                self._main[id(parameter)] = own, begin
                begin += int(parameter.numel()) if flat else 0
        super().__init__(model, optimizer, flat, scaler=scaler, group=group)

    def _pieces(self) -> dict[str, tuple[Piece, Owned]]:
        owned, found = self._owned(), {}
        for name, parameter in self.named_parameters():
            if id(parameter) in self._main:
                whole, begin = self._main[id(parameter)]
                size = int(parameter.numel())
                piece = Piece(name, whole, begin, size, 0, size, parameter.detach().reshape(-1))
                found[name] = piece, owned.get(id(whole), NOBODY)
        return found

    def _accumulated(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                self._grads[name] = int(parameter.grad.numel()), parameter.grad.dtype


class ZeroLoop(DeepSpeedLoop):
    """Whole parameters, sharded states."""

    kind = replace(
        DDP, name="zero", summary="DeepSpeed's ZeRO 1 and 2", label="DeepSpeed ZeRO", layout="even", shards=frozenset(STATES), distributed_optimizer="always",
        main_weights="wrapper",
    )  # fmt: skip
    name = "zero"

    def __init__(self, model: Any, optimizer: Any, *, scaler: Any = None, group: Any = None) -> None:
        held: Any = getattr(optimizer, "single_partition_of_fp32_groups", None)
        flat: list[torch.Tensor] = list(held or getattr(optimizer, "fp32_groups_flat_partition", ()))
        if not flat:
            what = f"witness() got DeepSpeed's {type(optimizer).__name__}: it has no FP32 copy of the weights that is known"
            raise BadValue(f"{what}, unlike ZeRO 1 to 3 and its optimizers without ZeRO")
        super().__init__(model, optimizer, flat, scaler=scaler, group=group)

    @property
    def sharded(self) -> Sharded:  # type: ignore[override]
        """What is sharded, by ZeRO stage."""
        return "gradients" if getattr(self.outer, "partition_gradients", False) else "optimizer"

    def _pieces(self) -> dict[str, tuple[Piece, Owned]]:
        owned, found = self._owned(), {}
        for name, parameter in self.named_parameters():
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is not None:
                flat = self._flat[mapping.param_group_index]
                where, stored = mapping.hp_fragment_address, mapping.lp_fragment_address
                begin = int(stored.start)
                own = parameter.detach().reshape(-1)[begin : begin + stored.numel]
                piece = Piece(name, flat, int(where.start), int(where.numel), begin, int(parameter.numel()), own)
                found[name] = piece, owned.get(id(flat), NOBODY)
        return found

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


class Zero3Loop(DeepSpeedLoop):
    """Sharded parameters, gradients and states."""

    kind = replace(
        FSDP, name="zero3", summary="DeepSpeed's ZeRO 3", label="DeepSpeed ZeRO 3", layout="even", main_weights="wrapper",
    )  # fmt: skip
    name = "zero3"
    sharded = "everything"

    def __init__(self, model: Any, optimizer: Any, *, scaler: Any = None, group: Any = None) -> None:
        flat: list[torch.Tensor] = list(optimizer.fp32_partitioned_groups_flat)
        if not all(one.numel() for one in flat):
            what = "witness() got DeepSpeed's ZeRO 3 with states on NVMe"
            raise BadValue(f"{what}, which cannot be observed: use states on CPU or GPU")
        super().__init__(model, optimizer, flat, scaler=scaler, group=group)

    def _pieces(self) -> dict[str, tuple[Piece, Owned]]:
        outer: Any = self.outer
        inner, found = self.inner[0], {}
        for name, parameter in self.named_parameters():
            place = outer.grad_position.get(outer.get_param_id(parameter)) if parameter.requires_grad else None
            if place is None:
                continue
            size, whole = int(parameter.ds_tensor.ds_numel), int(parameter.ds_numel)
            ranked = getattr(outer, "_get_param_partition_rank", None)  # releases before 0.19 shard over one group
            begin = size * int(dist.get_rank(outer.dp_process_group) if ranked is None else ranked(parameter))
            count = max(0, min(size, whole - begin))  # without padding
            own = parameter.ds_tensor.detach().reshape(-1)[:count]
            piece = Piece(name, self._flat[place[0]], place[1], count, begin, whole, own)
            # DeepSpeed puts a partition into its optimizer's group only while it updates it
            found[name] = piece, Owned(inner, inner.param_groups[outer.sub_group_to_group_id[place[0]]])
        return found

    def audit_copies(self, read: Mapping[str, int] | None) -> Copies:
        """Part sizes, and digests of what the forward pass read."""
        return copies_of({name: (piece.count, piece.whole) for name, (piece, _) in self._pieces().items()}, read)

    def _size(self, name: str, parameter: Any) -> int:
        return int(parameter.ds_numel)

    def _stored(self, held: Held) -> Any:
        return held.parameter.ds_tensor.detach() if held.part is None else held.part

    def _accumulated(self) -> None:
        """The accumulated gradients before the step begins: one piece for each parameter of a sub-group, in order."""
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        for number, pieces in dict(self.outer.averaged_gradients).items():
            for parameter, piece in zip(self.outer.fp16_groups[number], pieces or (), strict=False):
                self._grads[names[id(parameter)]] = int(piece.numel()), piece.dtype
