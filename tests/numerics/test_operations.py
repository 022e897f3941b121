"""One table of torch's collectives and one of its GEMMs, on which the audit, the statistics and the simulation stand."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mpbridge
from mpbridge.common.errors import Refused
from mpbridge.numerics.observation.operations import COLLECTIVES, GEMMS, OperationObserver
from mpbridge.observe.audit import Watch
from mpbridge.observe.audit.flags import Updates

try:
    from mpbridge.training.simulate.rank import Recorder
except Refused as _why:  # torch 2.6
    pytest.skip(str(_why), allow_module_level=True)

NO_DATA = {"barrier", "monitored_barrier_", "check_for_nan"}
"""Operations of c10d that move none of a model's numbers."""
NEWER = {"gather_into_tensor_"}
"""Of torch 2.15."""


def test_every_collective_of_the_installed_torch_is_in_the_table() -> None:
    import torch.distributed  # registers c10d

    names = {schema.name[6:] for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("c10d::")}
    assert (names - NO_DATA) | NEWER == set(COLLECTIVES)


def test_an_argument_of_the_table_is_the_operations_input() -> None:
    schemas = {one.name[6:]: one for one in torch._C._jit_get_all_schemas() if one.name.startswith("c10d::")}
    for name, (kind, payload) in COLLECTIVES.items():
        if name in NEWER - set(schemas):
            continue
        argument = schemas[name].arguments[payload]
        assert "Tensor" in str(argument.type), name
        assert "input" in argument.name or argument.name in ("tensors", "inputs"), (name, kind)


def test_no_second_list_of_collectives_exists() -> None:
    root = Path(mpbridge.__file__).parent
    names = [name for name in COLLECTIVES if name.endswith("_")]
    word = re.compile("|".join(f'"{name}"' for name in names))
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if word.search(path.read_text())}
    assert found == {"numerics/observation/operations.py"}


FACTORS = {
    "mm": lambda a, b: torch.ops.aten.mm(a, b),
    "addmm": lambda a, b: torch.ops.aten.addmm(torch.zeros(2, 5), a, b),
    "bmm": lambda a, b: torch.ops.aten.bmm(a[None], b[None]),
    "baddbmm": lambda a, b: torch.ops.aten.baddbmm(torch.zeros(1, 2, 5), a[None], b[None]),
    "_scaled_mm": None,  # CPUs have it in some releases only
    "linear": None,  # decomposed above a dispatch mode, except in inference mode
}


@pytest.mark.parametrize("name", GEMMS)
def test_every_observer_sees_every_gemm(name: str) -> None:
    if FACTORS[name] is None:
        assert GEMMS[name] == (0, 1)
        return
    seen: list[tuple[torch.Size, torch.Size]] = []
    observer = OperationObserver()
    observer.multiplies = lambda left, right, out: seen.append((left.shape[-2:], right.shape[-2:]))  # type: ignore[method-assign]
    a, b = torch.ones(2, 3), torch.ones(3, 5)
    with observer, Recorder() as recorder:
        FACTORS[name](a, b)
    assert seen == [((2, 3), (3, 5))]
    assert recorder.products == {(2, 5, 3, "fp32"): 1}


@pytest.mark.filterwarnings("ignore:.torch.distributed.all_gather_coalesced. will be deprecated:FutureWarning")
def test_audit_and_simulation_record_the_same_messages() -> None:
    """Each of the two lists lacked what the other had: a gather of several tensors, an all-to-all."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        meta, seen = torch.ones(8, device="meta"), Recorder()
        with seen:
            dist.all_to_all_single(meta.clone(), meta)
            dist.all_gather_coalesced([[torch.ones(8, device="meta")] for _ in range(4)], [meta])
            dist.reduce(meta, 0)
        assert seen.wires == {(kind, 4, "fp32", 32): 1 for kind in ("all_to_all", "all_gather", "reduce")}
        real, watch = torch.ones(8), Watch()
        watch.start([torch.nn.Linear(1, 1)])
        try:
            dist.all_to_all_single(real.clone(), real)
            dist.all_gather_coalesced([[torch.ones(8)] for _ in range(4)], [real])
            dist.reduce(real, 0)
        finally:
            watch.stop()
        assert [(one.kind, one.role, one.elements) for one in watch.sent] == [
            ("all_to_all", "", 8), ("all_gather", "gathered", 8), ("reduce", "reduced", 8),
        ]  # fmt: skip
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("calls", "faults"), [
    (1, []), (0, ["optimizer 0: counted 0 updates, 2 were applied"]), (2, ["optimizer 0: counted 4 updates, 2 were applied"]),
])  # fmt: skip
def test_an_optimizer_that_steps_never_or_twice_for_an_update_is_named(calls: int, faults: list[str]) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer, updates = torch.optim.AdamW([parameter]), Updates()
    engine: Any = SimpleNamespace(optimizer=optimizer)
    for times in (1, calls, calls):
        parameter.grad = torch.ones(4)
        for _ in range(times):
            optimizer.step()
        updates.applied(engine)
    assert updates.faults(engine) == faults
