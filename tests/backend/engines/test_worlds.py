"""Two processes on gloo: every parallel layout trains as one process does, and what cannot work is refused."""

from pathlib import Path
from typing import Any

import pytest

from tests.backend.engines import worker

ONE = {"tp2_sp_rms": "one_rms", "pp2_untied": "one_untied", "vpp2": "one_deep"}
"""Which single-process run a layout has to repeat; 'one' where it is not named."""
SAME = [
    name
    for name in worker.SCENARIOS
    if name not in ("ep2", "ep2_sharded", "cp2", "vpp2_batched", "dp2_dist_muon") and not name.startswith("one")
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All scenarios, one world after the other; each rebuilds its engine in one process a dozen times."""
    folder: Path = tmp_path_factory.mktemp("worlds")
    alone = [name for name in worker.SCENARIOS if name.startswith("one")]
    others = [name for name in worker.SCENARIOS if not name.startswith("one") and name != "dp2_dist_muon"]
    return worker.world(1, alone, folder, kinds=["fp32"]) | worker.world(2, others, folder, kinds=["fp32"])


@pytest.mark.parametrize("name", SAME)
def test_two_processes_train_as_one_does(reports: dict[str, Any], name: str) -> None:
    one, two = reports[f"{ONE.get(name, 'one')}/fp32"], reports[f"{name}/fp32"]
    # FP32, sums of a few thousand terms in another order: six digits
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-6)
    assert two["held"] == pytest.approx(one["held"], rel=1e-6)
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-5)


@pytest.mark.parametrize("name", [*SAME, "ep2"])
def test_every_rank_reports_the_same_loss(reports: dict[str, Any], name: str) -> None:
    first, second = reports[f"{name}/fp32"]["every"]
    assert first == second


@pytest.mark.parametrize("name", [*SAME, "ep2"])
def test_parameters_have_global_names(reports: dict[str, Any], name: str) -> None:
    family = {"ep2": "one_moe"} | ONE
    whole = set(reports[f"{family.get(name, 'one')}/fp32"]["names"])
    ranks = [set(names) for names in reports[f"{name}/fp32"]["all_names"]]
    # a tied output layer is a second copy on the last stage
    assert set.union(*ranks) - {"output_layer.weight"} == whole - {"output_layer.weight"}
    if name.startswith(("pp2", "vpp2")):
        assert not {n for n in ranks[0] & ranks[1] if n.startswith("decoder.layers")}, "each layer is on one stage"
    if name == "ep2":
        assert ranks[0] ^ ranks[1] == {n for n in whole if ".local_experts." in n}, "each expert is on one rank"


def test_experts_train_under_expert_parallelism_sharded_or_not(reports: dict[str, Any]) -> None:
    losses = reports["ep2/fp32"]["losses"]
    assert losses[-1] < losses[0] - 0.5
    assert reports["ep2_sharded/fp32"]["losses"] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vpp2_batched", "with batched communication the run diverges silently"),
        ("cp2", "context_parallel_size=2; expected a GPU"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(reports: dict[str, Any], name: str, reason: str) -> None:
    assert reason in reports[f"{name}/fp32"]["refused"]
