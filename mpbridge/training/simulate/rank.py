"""One simulated rank: built, its live tensors compared with the prediction, audited, and stepped on request, with its matrix products and collectives held against the list of
operations that predictions price."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mpbridge.backend.devices import device_layer
from mpbridge.backend.engines.mcore import McoreEngine, allocate_moments
from mpbridge.backend.engines.optimizers import CpuFusedAdam
from mpbridge.common.errors import Refused
from mpbridge.numerics.observation.modules import tensors_in
from mpbridge.numerics.observation.operations import OperationObserver
from mpbridge.numerics.observation.tensors import storage
from mpbridge.observe.audit import examine as audits
from mpbridge.planning.estimate.build import work
from mpbridge.planning.memory.roles import roles
from mpbridge.training.simulate import Simulated
from mpbridge.training.simulate.meta import META, at_rest, install, install_quantized, resting

if TYPE_CHECKING:
    from mpbridge.settings.container import Run

try:
    from torch._C._distributed_c10d import FakeWork
except ImportError:
    raise Refused(
        f"recording a simulated step needs a torch with FakeWork (2.13 and 2.15 have it, 2.6 does not), found {torch.__version__}: install a newer torch"
    ) from None

Wire = tuple[str, int, str, int]
"""(kind, ranks of the group, dtype, input bytes)."""
MatmulShape = tuple[int, int, int, str]
"""(smaller and larger outer size, inner size, dtype)."""


class Recorder(OperationObserver):  # type: ignore[no-untyped-call]
    """While active: `wires` and `products` count what is issued. It answers collectives itself: torch has no meta kernels for coalesced ones."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[MatmulShape] = Counter()

    @property
    def wires(self) -> Counter[Wire]:
        """The collectives."""
        return Counter((one.kind, len(one.group), one.dtype, one.end - one.begin) for one in self.sent)

    def multiplies(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        """Counts a product by its sizes; each of a batch."""
        m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
        self.products[min(m, n), max(m, n), k, storage(left)] += left.shape[:-2].numel()

    def communicates(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Records and answers a collective of meta tensors."""
        if any(one.device.type != "meta" for one in tensors_in(args)):
            return func(*args, **kwargs)  # objects; a fake group returns this rank's own
        self.record(name, args)
        done = FakeWork().boxed()
        return (args[0], done) if len(func._schema.returns) == 2 else done


_SMALL = 4096
"""Bytes below which a collective is bookkeeping (norms, counts, losses, flags) that the list omits."""


def compare_products(run: Run, rank: int, batches: int, seen: Mapping[Any, int]) -> list[str]:
    """Differences in matrix products."""
    wanted: Counter[tuple[int, int, int, str]] = Counter()
    grouped = Counter[str]()
    for gemm in work(run.policy, run.facts, rank).gemms:
        # without kernels quantized operands are multiplied in the compute dtype: shapes and counts are compared
        issued = run.policy.compute.short if gemm.scaling else gemm.format
        if gemm.grouped:
            grouped[issued] += int(gemm.flops) * batches
        else:
            wanted[(*gemm.key, issued)] += gemm.times * batches
    left = Counter(seen)
    left.subtract({key: min(count, left[key]) for key, count in wanted.items()})
    found = [
        f"product {_size(key)}: issued {seen.get(key, 0)}, listed {count}"
        for key, count in wanted.items()
        if seen.get(key, 0) < count
    ]
    rest: Counter[str] = Counter()
    for (a, b, k, dtype), count in left.items():
        rest[dtype] += 2 * a * b * k * count
    # what multiplies inside a scan is one kernel on a GPU, and not listed (planning.memory.limitations)
    inside = {"fp32"} if "M" in run.facts.shape.pattern else set()
    for dtype in sorted({*rest, *grouped} - inside):
        # experts' products have a row more or less if tokens do not divide evenly
        if abs(rest[dtype] - grouped[dtype]) > 0.002 * max(rest[dtype], grouped[dtype]):
            found.append(
                f"other products in {dtype}: issued {rest[dtype]:.4g} FLOPs, listed {grouped[dtype]:.4g} of experts"
            )
    return found


def _size(key: tuple[int, int, int, str]) -> str:
    return f"[{key[0]}, {key[2]}] x [{key[2]}, {key[1]}] {key[3]}"


def compare_wires(run: Run, rank: int, batches: int, seen: Mapping[Any, int]) -> list[str]:
    """Differences in collectives. Buckets of one buffer count together; all-to-all and the gathers of experts, in sum."""
    one = work(run.policy, run.facts, rank)
    wanted: Counter[tuple[str, int, str]] = Counter()
    for wire in one.collectives:
        # a fake context-parallel attention sends nothing
        if wire.group != "context":
            wanted[wire.kind, _ranks(wire), wire.dtype] += wire.bytes * wire.times * batches
    for wire in one.step:
        wanted[wire.kind, _ranks(wire), wire.dtype] += wire.bytes * wire.times
    found: Counter[tuple[str, int, str]] = Counter()
    for (kind, ranks, dtype, size), count in seen.items():
        if ranks > 1 and size >= _SMALL and dtype != "int64":
            found[kind, 0 if kind in ("send", "receive") else ranks, dtype] += size * count
    faults = []
    for key in sorted(set(wanted) | set(found)):
        (kind, ranks, dtype), issued, listed = key, found[key], wanted[key]
        # reductions of norms' gradients and of losses, which the list omits: less than a thousandth of the relevant traffic
        bookkeeping = kind in ("all_reduce", "broadcast") and not listed and issued < 2**24
        if abs(issued - listed) > 0.005 * max(issued, listed) and not bookkeeping:
            where = f"{kind} over {ranks or 'neighbouring'} ranks in {dtype}"
            faults.append(f"{where}: issued {issued:,} bytes, listed {listed:,}")
    return faults


def _ranks(wire: Any) -> int:
    return 0 if wire.group == "pipeline" else int(wire.ranks)


def simulate_rank(run: Run, rank: int, *, step: bool) -> Simulated:
    """Builds that rank in this process, which cannot be used for anything else afterwards."""
    start = time.process_time()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=run.world_size)
    install()
    if run.played:
        install_quantized()
    with nullcontext() if run.played else device_layer(False, fused_adam=CpuFusedAdam), Recorder() as seen:
        engine = McoreEngine(run, cuda=run.played is not None)
        engine._device = META
        with engine._layer():
            engine._build(None)
        stepped: dict[str, Any] = _step(engine, run, seen, rank) if step else {}
        return _judge(engine, run, rank, start, stepped)


def _judge(engine: Any, run: Run, rank: int, start: float, stepped: dict[str, Any]) -> Simulated:
    allocate_moments(engine.optimizer)
    live, listed = list(engine.tensors()), list(roles(run.policy, run.facts, rank=rank))
    if run.played:
        live = list(at_rest(live, apart=run.policy.reuse_grad_buffer))
        listed = list(resting(listed))
    storages = {one.tensor.untyped_storage().data_ptr(): one.tensor.untyped_storage().nbytes() for one in live}
    wanted: Counter[tuple[str, str, str]] = Counter()
    for role in listed:
        wanted[role.name, role.parameter, role.dtype.value] += role.elements + role.padding
    found = _elements(live)
    keys = sorted(set(found) | set(wanted))
    differences = tuple(
        f"{' '.join(key)}: live {found[key]:,} elements, predicted {wanted[key]:,}"
        for key in keys
        if found[key] != wanted[key]
    )
    bad, audited = _audit(engine, run)
    return Simulated(
        rank=rank,
        parameters=sum(one.numel() for _, one in engine.named_parameters()),
        live=sum(storages.values()),
        predicted=sum(role.bytes for role in listed),
        rows=len(keys),
        differences=differences,
        audit=bad,
        audited=audited,
        seconds=time.process_time() - start,
        peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **stepped,
    )


def _elements(live: Any) -> Counter[tuple[str, str, str]]:
    """(role, parameter, dtype) -> elements; gradients that the optimizer reads in place count once."""
    grads = {one.tensor.untyped_storage().data_ptr() for one in live if one.role == "grads"}
    found: Counter[tuple[str, str, str]] = Counter()
    for one in live:
        if not (one.role == "main_grads" and one.tensor.untyped_storage().data_ptr() in grads):
            found[one.role, one.parameter, str(one.tensor.dtype).removeprefix("torch.")] += one.tensor.numel()
    return found


def _audit(engine: Any, run: Run) -> tuple[tuple[str, ...], int]:
    """(findings that are not as promised, number of all findings). Other ranks do not exist, so only this rank's findings are judged."""
    audits.everywhere = lambda seen: [seen]
    report = audits.audit(run.policy, engine, stage="live")
    # quantized linears need kernels: only the storage around them is built here
    judged = [f for f in report.findings if f.subject != "linears" or run.facts.realization != "emulated"]
    bad = [f"{f.subject}: promised {f.promised}, found {f.found} {f.offenders[:3]}" for f in judged if not f.ok]
    return tuple(bad), len(judged)


def _step(engine: Any, run: Run, seen: Any, rank: int) -> dict[str, Any]:
    facts = run.facts
    batches = max(1, facts.global_batch_size // (facts.micro_batch_size * facts.parallel.data))
    seen.sent.clear()
    seen.products.clear()
    engine.train_step(_feed(run), microbatches=batches)
    differences = [*compare_products(run, rank, batches, seen.products), *compare_wires(run, rank, batches, seen.wires)]
    issued = {"products": sum(seen.products.values()), "wires": sum(seen.wires.values())}
    return issued | {"step": tuple(differences)}


def _feed(run: Run) -> Iterator[dict[str, Any]]:
    size = (run.facts.micro_batch_size, run.facts.shape.seq_length // run.facts.parallel.context)
    while True:
        batch = {name: torch.empty(size, dtype=torch.int64) for name in ("tokens", "labels", "position_ids")}
        yield batch | {"loss_mask": torch.empty(size)}
