"""Two processes over Transformer Engine: sharded weights at rest, gathers in FP8, tensor, pipeline and expert parallelism, audited in every step."""

import json
import math

import pytest

from tests import worlds
from tests.te_cpu.two_ranks import REGISTRY, RUNS
from tests.te_cpu.wheels import NEWEST, OLDEST, ROOT, environment, release_or_skip

CHEAP = ("data parallel", "data parallel, overlap", "delayed, tensor parallel", "pipeline", "experts")
BLACKWELLS = tuple(name for name, (recipe, *_) in RUNS.items() if "mxfp8" in recipe or "nvfp4" in recipe)
HOPPERS = tuple(name for name in RUNS if name not in BLACKWELLS)


@pytest.fixture(autouse=True)
def where_the_wheels_are(monkeypatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def losses(machine: str, te: str, names: tuple[str, ...], timeout: float = 840.0) -> dict[str, dict[str, float]]:
    script = str(ROOT / "tests/te_cpu/two_ranks.py")
    said = worlds.start(2, script, machine, release_or_skip(te), *names, timeout=timeout, imported=False)
    found = {row["name"]: row for line in said.splitlines() if line.startswith("{") for row in [json.loads(line)]}
    assert names == (REGISTRY,) or set(found) == set(names)
    for row in found.values():
        assert math.isfinite(row["last"])
        assert row["last"] < row["first"], row
    return found


def test_the_parallel_layouts_train_and_an_overlapped_gather_changes_no_bit() -> None:
    found = losses("h100", OLDEST, CHEAP)
    assert found["data parallel"]["last"] == found["data parallel, overlap"]["last"]


@pytest.mark.slow
@pytest.mark.parametrize("te", [OLDEST, NEWEST])
@pytest.mark.parametrize(("machine", "names"), [("h100", HOPPERS), ("b200", BLACKWELLS)], ids=["h100", "b200"])
def test_every_layout_trains(machine: str, names: tuple[str, ...], te: str) -> None:
    losses(machine, te, names)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("te", [OLDEST, NEWEST])
@pytest.mark.parametrize("machine", ["h100", "b200"])
def test_every_recipe_of_the_registry_trains(machine: str, te: str) -> None:
    found = losses(machine, te, (REGISTRY,), timeout=2300)
    assert {"bf16_mixed, gpt_tiny", "bf16_with_fp8_rowwise, moe_tiny"} <= set(found)
