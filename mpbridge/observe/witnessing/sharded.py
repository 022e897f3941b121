"""Loops of plain torch whose wrapper shards parameters: FSDP2 (fully_shard) and FSDP1, with the internals of its flat tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from mpbridge.backend.engines.contract import Live
from mpbridge.backend.engines.shard_optimizer import placed
from mpbridge.numerics.observation.modules import bare
from mpbridge.numerics.observation.tensors import digest, local
from mpbridge.observe.audit.holdings import Held, row_of
from mpbridge.observe.audit.replicas import Copies
from mpbridge.observe.audit.traffic import Traffic
from mpbridge.observe.audit.watch import Watch
from mpbridge.observe.witnessing.plain import FSDP, NOBODY, Piece, TorchLoop, copies_of, states


def flat_pieces(model: Any) -> Iterator[Piece]:
    """Every parameter of every unit, then those that FSDP ignores (whole on every rank)."""
    seen: set[int] = set()
    for path, unit in model.named_modules():
        handle = getattr(unit, "_handle", None)
        if handle is None or not hasattr(handle, "flat_param"):
            continue
        flat = handle.flat_param
        seen.add(id(flat))
        originals = getattr(flat, "_params", None)
        for index, (name, numel) in enumerate(zip(flat._fqns, flat._numels, strict=False)):
            held = flat._shard_param_infos[index]
            owner = flat if originals is None else originals[index]
            seen.add(id(owner))
            there = bool(held.in_shard)
            yield Piece(
                name=bare(f"{path}.{name}" if path else name),
                owner=owner,
                start=int(held.offset_in_shard) if there and originals is None else 0,
                count=int(held.numel_in_shard) if there else 0,
                begin=int(held.intra_param_start_idx) if there else 0,
                whole=int(numel),
            )
    for name, parameter in model.named_parameters():
        if id(parameter) not in seen:
            size = int(parameter.numel())
            yield Piece(bare(name), parameter, 0, size, 0, size)


class Fsdp2Loop(TorchLoop):
    """`fully_shard`: every parameter is a DTensor split along its rows."""

    kind = FSDP
    name = "fsdp2"
    sharded = "everything"
    wrapper = "torch FSDP2"

    def _units(self) -> Iterator[Any]:
        """torch's own state of every sharded unit."""
        for chunk in self.model:
            for module in chunk.modules():
                unit = getattr(getattr(module, "_get_fsdp_state", lambda: None)(), "_fsdp_param_group", None)
                if unit is not None:
                    yield unit

    def audit_ranks(self) -> tuple[int, ...]:
        """Ranks that hold or replicate the shards, without tensor-parallel ranks."""
        unit = next(self._units(), None)
        if self.group is not None or unit is None:
            return super().audit_ranks()
        return tuple(unit.mesh_info.mesh.mesh.flatten().tolist())

    def legs(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The two dimensions of the mesh: replicas, shards."""
        unit: Any = next(self._units(), None)
        mesh = None if unit is None else unit.mesh_info.mesh
        if mesh is None or mesh.ndim != 2 or not hasattr(unit.mesh_info, "replicate_process_group"):
            return None
        return _ranks(unit.mesh_info.shard_process_group), _ranks(unit.mesh_info.replicate_process_group)

    @property
    def of_the_mean(self) -> float:  # type: ignore[override]
        """From `set_gradient_divide_factor` (torchtitan: 1, since the loss is divided by the tokens of all ranks)."""
        factors = {unit.gradient_divide_factor for unit in self._units()} - {None}
        return len(self.audit_ranks()) / min(factors) if factors else 1.0

    def audit_traffic(self, promised: dict[str, set[str]], watch: Watch, microbatches: int) -> Traffic:
        """As elsewhere, and the sums over tensor-parallel ranks of replicated parameters' gradients: `reduce_dtype` asks for them too."""
        seen = super().audit_traffic(promised, watch, microbatches)
        # torch 2.13 has the policy at the unit, 2.15 at each of its parameters
        owners = (one for unit in self._units() for one in ([unit] if hasattr(unit, "mp_policy") else unit.fsdp_params))
        if {one.mp_policy.reduce_dtype for one in owners} == {torch.float32}:
            mine = set(self.audit_ranks())
            whole: dict[int, list[str]] = {}
            for name, parameter in self.named_parameters():
                if self._is_cut_twice(parameter) and parameter.placements[-1].is_replicate():
                    whole.setdefault(int(parameter.numel()), []).append(name)
            seen.faults += [
                f"{name}: summed over {len(one.group)} tensor-parallel ranks in {one.dtype}, reduce_dtype is fp32"
                for one in watch.functional
                if one.kind == "all_reduce" and one.dtype != "fp32" and not set(one.group) <= mine
                for name in whole.get(one.elements, ())
            ]
        return seen

    def _begin(self, name: str, parameter: Any) -> int:
        return first_element(name, parameter)

    def audit_copies(self, read: Mapping[str, int] | None) -> Copies:
        """Shard sizes, and digests of what the forward pass read."""
        seen, first = Copies(), min(self.audit_ranks())
        for name, parameter in self.named_parameters():
            if hasattr(parameter, "_local_tensor"):
                seen.shards[f"{name}{_copy(parameter)}"] = (int(local(parameter).numel()), int(parameter.numel()))
                if read is not None and name in read:
                    # a tensor-parallel slice is told from others by the first rank of those that average its gradients
                    seen.whole[name, first if self._is_cut_twice(parameter) else 0, 0] = read[name]
            else:
                seen.whole[name, 0, 0] = digest(parameter)
        return seen

    def cut_twice(self) -> list[str]:
        """Parameters whose mesh has more ranks than average their gradients."""
        return [name for name, parameter in self.named_parameters() if self._is_cut_twice(parameter)]

    def _size(self, name: str, parameter: Any) -> int:
        """Elements over the ranks that average its gradients: a tensor-parallel slice, or the whole parameter."""
        if not self._is_cut_twice(parameter):
            return int(parameter.numel())
        return int(local(parameter).numel()) * len(self.audit_ranks())

    def _is_cut_twice(self, parameter: Any) -> bool:
        mesh = getattr(parameter, "device_mesh", None)
        return mesh is not None and math.prod(mesh.shape) > len(self.audit_ranks())


class Fsdp1Loop(TorchLoop):
    """FullyShardedDataParallel: every unit is one flat tensor, split evenly; parameters are pieces of it."""

    kind = replace(FSDP, label="torch FSDP1", layout="even")
    name = "fsdp1"
    sharded = "everything"
    wrapper = "torch FSDP1"

    def legs(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """For HYBRID_SHARD: the ranks of one node, and the same rank on every node."""
        for chunk in self.model:
            for module in chunk.modules():
                between = getattr(module, "_inter_node_pg", None)
                if between is not None and hasattr(module, "process_group"):
                    return _ranks(module.process_group), _ranks(between)
        return None

    def _pieces(self) -> list[Piece]:
        return [piece for chunk in self.model for piece in flat_pieces(chunk)]

    def named_parameters(self) -> list[tuple[str, Any]]:
        """Pieces by the name of their parameter."""
        return [(piece.name, piece.owner) for piece in self._pieces()]

    def audit_holdings(self) -> Iterator[Held]:
        """Every piece with the optimizer that updates it or its flat tensor."""
        owned = self._owned()
        for piece in self._pieces():
            grad = piece.owner.grad
            mine = owned.get(id(piece.owner), NOBODY)
            yield piece.held(piece.owner, mine, grad=None if grad is None else piece.of(grad))

    def tensors(self) -> Iterator[Live]:
        """The live tensors of this rank."""
        for held in self.audit_holdings():
            assert held.part is not None
            yield Live(role="params", parameter=held.name, tensor=held.part)
            if held.grad is not None:
                yield Live(role="grads", parameter=held.name, tensor=held.grad)
            yield from states(held)
        yield from self._buffers()

    def audit_copies(self, read: Mapping[str, int] | None) -> Copies:
        """Piece sizes, and digests of what the forward pass read."""
        legs = self.legs()
        number = legs[1].index(dist.get_rank()) if legs else 0
        shards = {piece.name: (piece.count, piece.whole) for piece in self._pieces()}
        return copies_of(shards, read, copy=f" (copy {number})" if number else "")

    def _size(self, name: str, parameter: Any) -> int:
        return next(piece.whole for piece in self._pieces() if piece.name == name)


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _copy(parameter: Any) -> str:
    """Which replica a shard belongs to: '' for the first; others are along replicated dimensions and on the meshes of other ranks."""
    mesh, here = parameter.device_mesh, parameter.device_mesh.get_coordinate() or ()
    along = [place for place, how in zip(here, parameter.placements, strict=False) if how.is_replicate()]
    first = int(mesh.mesh.flatten()[0])
    return f" (copy {first}{along or ''})" if first or any(along) else ""


def first_element(name: str, parameter: Any) -> int:
    """Offset of this rank's rows of a parameter, in elements."""
    return placed(name, parameter)[0] * row_of(parameter) if hasattr(parameter, "_local_tensor") else 0
