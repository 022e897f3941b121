"""One simulated rank: built, its live tensors compared with the prediction, audited, and stepped on request."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpbridge.settings.container import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The results for one rank."""

    rank: int
    parameters: int
    live: int
    """Bytes of all storages that play a role."""
    predicted: int
    rows: int
    """(role, parameter, dtype) that exist or were predicted."""
    differences: tuple[str, ...]
    """Rows whose elements differ."""
    audit: tuple[str, ...]
    """Findings that are not as promised."""
    audited: int
    """All findings."""
    seconds: float
    """CPU time without imports."""
    peak: int
    """Peak resident bytes of the process."""
    products: int = 0
    """Matrix products recorded in one step."""
    wires: int = 0
    """Collectives recorded in one step."""
    step: tuple[str, ...] = field(default=())
    """Where the recorded step and the list of operations differ."""

    @property
    def ok(self) -> bool:
        """Whether everything agrees."""
        return not self.differences and not self.audit and not self.step and self.live == self.predicted


def simulate_rank(run: Run, rank: int, *, step: bool) -> Simulated:
    """Builds that rank in this process, which cannot be used for anything else afterwards."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.mcore import McoreEngine
    from mpbridge.backend.engines.optimizers import CpuFusedAdam
    from mpbridge.training.simulate.meta import META, install, install_quantized
    from mpbridge.training.simulate.recorder import Recorder

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
    from mpbridge.backend.engines.live import allocate_moments
    from mpbridge.planning.memory.roles import roles
    from mpbridge.training.simulate.meta import at_rest, resting

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
    from mpbridge.observe.audit import examine as audits

    audits.everywhere = lambda seen: [seen]
    report = audits.audit(run.policy, engine, stage="live")
    # quantized linears need kernels: only the storage around them is built here
    judged = [f for f in report.findings if f.subject != "linears" or run.facts.realization != "emulated"]
    bad = [f"{f.subject}: promised {f.promised}, found {f.found} {f.offenders[:3]}" for f in judged if not f.ok]
    return tuple(bad), len(judged)


def _step(engine: Any, run: Run, seen: Any, rank: int) -> dict[str, Any]:
    from mpbridge.training.simulate.recorder import compare_products, compare_wires

    facts = run.facts
    batches = max(1, facts.global_batch_size // (facts.micro_batch_size * facts.parallel.data))
    seen.clear()
    engine.train_step(_feed(run), microbatches=batches)
    differences = [*compare_products(run, rank, batches, seen.products), *compare_wires(run, rank, batches, seen.wires)]
    return {
        "products": sum(seen.products.values()),
        "wires": sum(seen.wires.values()),
        "step": tuple(differences),
    }


def _feed(run: Run) -> Iterator[dict[str, Any]]:
    import torch

    size = (run.facts.micro_batch_size, run.facts.shape.seq_length // run.facts.parallel.context)
    while True:
        yield {name: torch.empty(size, dtype=torch.int64) for name in ("tokens", "labels", "position_ids")} | {
            "loss_mask": torch.empty(size)
        }
