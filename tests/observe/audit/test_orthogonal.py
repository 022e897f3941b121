"""What the audit sees of Muon: in what Newton-Schulz ran, that the update is the orthogonalized momentum, and who trains what."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpbridge.observe.audit.orthogonal import WORDS, _formats, _is_gathered, distances, replays
from tests.backend.engines import tiny, two_ranks
from tests.observe.audit.model_faults import CASTS

CONFIG = SimpleNamespace(muon_num_ns_steps=5, muon_scale_mode="spectral", muon_extra_scale_factor=1.0)


def torchs(direction: torch.Tensor) -> torch.Tensor:
    """torch.optim.Muon's update at rate 1 under megatron-core's scale `spectral`: torch's 0.2 sqrt(max(rows, columns)), five times."""
    weight = torch.nn.Parameter(torch.zeros_like(direction))
    weight.grad = direction
    how: Any = {"momentum": 0.0, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}
    torch.optim.Muon([weight], lr=5.0, weight_decay=0.0, **how).step()
    return weight.detach()


def by_svd(direction: torch.Tensor) -> torch.Tensor:
    """The same in FP64: the iteration maps singular values and leaves directions."""
    u, s, v = torch.linalg.svd(direction.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (-math.sqrt(max(direction.shape)) * (u * s) @ v).float()


UPDATES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[str]]] = {
    "torch": (torchs, ["bf16"]),
    "exact": (by_svd, ["fp32"]),
    "of a fifth of the size": (lambda direction: torchs(direction) / 5, []),
    "not orthogonalized": (lambda direction: -direction / direction.norm() * math.sqrt(max(direction.shape)), []),
    "of the other sign": (lambda direction: -torchs(direction), []),
}


@pytest.mark.parametrize(
    ("update", "shape", "rank"),  # every pair of two of them
    [(update, shape, (None, 8)[(i + j) % 2]) for i, update in enumerate(UPDATES) for j, shape in enumerate([(64, 64), (256, 64), (48, 130)])],
)  # fmt: skip
def test_an_update_tells_in_what_it_was_orthogonalized(update: str, shape: tuple[int, int], rank: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(*shape, generator=generator)
    if rank is not None:  # nearly of low rank, as momentum of few tokens is
        low = torch.randn(shape[0], rank, generator=generator) @ torch.randn(rank, shape[1], generator=generator)
        direction = low + 1e-3 * direction
    made, expected = UPDATES[update]
    assert _formats(distances(made(direction), replays(direction, CONFIG))) == expected


@pytest.mark.parametrize("shape", [(64, 64), (256, 64)])
def test_a_momentum_of_zero_moves_nothing_but_rounding_errors(shape: tuple[int, int]) -> None:
    """Adapters before their first update and experts without tokens have no gradient; weights of 0.02 are rounded, and the change divided by the rate."""
    zero, generator = torch.zeros(shape), torch.Generator().manual_seed(1)
    rounded = 0.02 * 2.0**-24 / 1e-3 * torch.randn(shape, generator=generator)
    assert set(_formats(distances(rounded, replays(zero, CONFIG)))) == set(WORDS.values())
    assert _formats(distances(torchs(torch.randn(shape, generator=generator)), replays(zero, CONFIG))) == []


@pytest.mark.parametrize("name", ["mode", "tp_mode"])  # megatron-core 0.16, 0.18 and later
@pytest.mark.parametrize(("word", "gathered"), [("duplicated", True), ("distributed", True), ("blockwise", False)])
def test_whether_tensor_parallel_ranks_gather_a_matrix(name: str, word: str, gathered: bool) -> None:
    held = SimpleNamespace(inner=SimpleNamespace(**{name: word}), updated=SimpleNamespace(partition_dim=0))
    assert _is_gathered(held) is gathered  # type: ignore[arg-type]


@pytest.fixture
def engine() -> Iterator[Any]:
    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.parallel import start_process_group, stop_process_group
    from mpbridge.backend.engines.registry import build_engine

    mine = start_process_group(False)
    with device_layer(False):
        built = build_engine(tiny.run("fp32", engine="fsdp2", optimizer=two_ranks.MUON))
        yield built
        built.close()
    if mine:
        stop_process_group()


def test_steps_that_nobody_told_of_are_no_change_of_the_momentum(engine: Any) -> None:
    from mpbridge.observe.audit.snapshot import Before, starts

    batches = tiny.batches()
    engine.train_step(batches, microbatches=2)
    left = starts(engine)
    assert Before(engine, left=left).between == []
    engine.train_step(batches, microbatches=2)
    assert Before(engine, left=left).between == []
    left = starts(engine)
    for state in engine.optimizer.parts[0].state.values():
        state["momentum_buffer"].mul_(0.5)
    assert len(Before(engine, left=left).between) == 8


@pytest.mark.parametrize(
    ("casts", "expected"),
    [pytest.param({}, {}, id="healthy"), pytest.param(CASTS, {"newton-schulz": "fp32"}, id="Newton-Schulz in FP32")],
)
def test_a_run_with_muon_is_audited(engine: Any, monkeypatch: pytest.MonkeyPatch, casts: Any, expected: Any) -> None:
    from mpbridge.observe.audit.examine import audit
    from mpbridge.observe.audit.snapshot import Before

    batches = tiny.batches()
    for name, cast in casts.items():
        monkeypatch.setattr(torch.Tensor, name, cast)
    engine.train_step(batches, microbatches=2)
    before = Before(engine)
    result = engine.train_step(batches, microbatches=2)
    monkeypatch.undo()
    report = audit(engine.run.policy, engine, stage="live", before=before, result=result, microbatches=2)
    seen = {one.subject: one for one in report.findings if one.subject in ("trained by", "newton-schulz")}
    assert {subject: one.found for subject, one in seen.items() if not one.ok} == expected
    assert not any(one.unseen for one in seen.values())
