"""Two processes on gloo: a checkpoint goes on to the bit in its own layout, and to six digits in another."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.backend.engines import worker


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return worker.world(
        2, ["dp2_sharded_overlap", "tp2"], tmp_path_factory.mktemp("resumed"), kinds=["fp32"], resume=True
    )


@pytest.mark.parametrize("name", ["dp2_sharded_overlap", "tp2"])
def test_two_processes_resume_to_the_bit(resumed: dict[str, Any], name: str) -> None:
    report = resumed[f"{name}/fp32"]
    assert report["equal"]
    assert report[name] == report["straight"]


@pytest.mark.parametrize(("name", "other"), [("tp2", "pp2"), ("tp2", "dp2"), ("dp2_sharded_overlap", "dp2_sharded")])
def test_a_checkpoint_goes_on_in_another_layout(resumed: dict[str, Any], name: str, other: str) -> None:
    report = resumed[f"{name}/fp32"]
    assert report[other] == pytest.approx(report["straight"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_sixteen_bits_train_and_resume_to_the_bit_on_two_processes(tmp_path: Path, kind: str) -> None:
    names = ["dp2_sharded_overlap", "dp2_sharded_aware", "ep2_sharded"]
    report = worker.world(2, names, tmp_path, kinds=[kind], resume=True)
    for name in names:
        assert report[f"{name}/{kind}"]["equal"]
        assert report[f"{name}/{kind}"][name] == report[f"{name}/{kind}"]["straight"]


@pytest.mark.skipif(find_spec("emerging_optimizers") is None, reason="needs Emerging-Optimizers")
def test_dist_muon_resumes_to_the_bit_on_two_processes(tmp_path: Path) -> None:
    """Each rank stores the states of the whole parameters that it is dealt."""
    report = worker.world(2, ["dp2_dist_muon"], tmp_path, kinds=["bf16"], resume=True)["dp2_dist_muon/bf16"]
    assert report["equal"]
    assert report["dp2_dist_muon"] == report["straight"]
