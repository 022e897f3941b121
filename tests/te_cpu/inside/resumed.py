"""Runs over Transformer Engine's modules that stop and go on: in the same realization to the bit, in the other one within a rounding here and there."""

import json

import pytest

from mpbridge import pretrain
from mpbridge.common.report.metrics import read
from mpbridge.training.checkpoint import store
from mpbridge.training.checkpoint.format import decoded
from tests.te_cpu.two_ranks import BLOCKWISE, DELAYED, MXFP8, NVFP4, OVERLAP, TENSORWISE, WHOLE

from .training import BLACKWELL, tiny

FAST = ("emulate=fast", "target=null", "te=null")
RECIPES = {MXFP8: OVERLAP, NVFP4: ()} if BLACKWELL else {DELAYED: OVERLAP, TENSORWISE: OVERLAP, BLOCKWISE: ()}
DEFAULT = MXFP8 if BLACKWELL else DELAYED
"""The one of the default suite: delayed scaling keeps amax histories beside the weights, and megatron-core fills MXFP8's weights anew."""
EACH = [pytest.param(recipe, marks=() if recipe == DEFAULT else pytest.mark.slow) for recipe in RECIPES]


def losses(folder, recipe: str, *more: str) -> list[float]:
    """Of the steps that this part of a run takes; it goes on from what `folder` holds."""
    log = folder.parent / f"log{len(list(folder.parent.iterdir()))}"
    kept = [f"checkpoint.save={folder}", f"checkpoint.load={folder}", f"logger.log_dir={log}"]
    settings = ["train.train_iters=6", "train.exit_interval=2", WHOLE, *RECIPES[recipe], *kept]
    pretrain(tiny(recipe, *settings, *more), quiet=True)
    return [row["loss"] for row in read(log / "metrics.jsonl") if "loss" in row]


def extra_states(place) -> list[dict]:
    """Extra states of modules (every one's under 2.11, delayed scaling's alone later), as the data that they are; the others' are null."""
    index, states = json.loads((place / "index.json").read_text()), []
    for key, (number, at, size) in index["objects"].items():
        if "_extra_state" in key:
            states.append(decoded(json.loads((place / index["files"][number]).read_bytes()[at : at + size])))
    return [state for state in states if state is not None]


@pytest.mark.parametrize("recipe", EACH)
def test_a_run_that_stops_goes_on_to_the_bit(recipe, tmp_path) -> None:
    whole = losses(tmp_path / "whole", recipe, "train.exit_interval=null", "train.train_iters=4")
    parts = [losses(tmp_path / "parts", recipe, "train.train_iters=4") for _ in range(2)]
    assert [len(part) for part in parts] == [2, 2]
    assert [loss for part in parts for loss in part] == whole
    if recipe == DELAYED:
        states = extra_states(store.saved(tmp_path / "parts")[-1].path)
        assert len(states) >= 8  # four linears in each of two layers
        fields = {"margin": 0, "amax_history_len": 1024}
        assert all(state["recipe"] == {"class": "DelayedScaling", "fields": fields} for state in states)
        assert any(state["amax_history_fwd"].any() for state in states)


@pytest.mark.parametrize("recipe", EACH)
def test_an_evaluation_changes_nothing_of_the_steps_behind_it(recipe, tmp_path) -> None:
    steps = ("train.exit_interval=null", "train.train_iters=4")
    often = losses(tmp_path / "often", recipe, *steps, "train.eval_interval=1", "train.eval_iters=1")
    assert often == losses(tmp_path / "never", recipe, *steps)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_goes_on_in_the_other_realization_and_back(recipe, tmp_path) -> None:
    """Weights at rest in FP8 are rounded from the main weights, emulated ones from BF16 weights; each realization draws its own random numbers."""
    whole = losses(tmp_path / "whole", recipe, "train.exit_interval=null")
    for name, ways in {"there": ((), FAST, ()), "here": (FAST, (), FAST)}.items():
        mixed = [loss for way in ways for loss in losses(tmp_path / name, recipe, *way)]
        assert mixed == pytest.approx(whole, rel=5e-3)
        assert mixed != whole
