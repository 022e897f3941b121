"""A schedule of recipes in one run: rules before step 0, the switch at its step, resumed on either side of it."""

from __future__ import annotations

import json

import pytest

from mpbridge.common.errors import Contradiction, Refused
from mpbridge.common.files import write_whole
from mpbridge.common.report.metrics import EVENTS
from mpbridge.planning.rules.table import require_here
from mpbridge.training import checkpointer
from mpbridge.training.checkpoint import store
from mpbridge.training.checkpoint.verdict import read_fingerprint
from tests.training.checkpoint.test_resume import values
from tests.training.survival import Hook, go, job, run
from tests.training.test_faults import Poison

LIST = [{"recipe": "bf16_with_nvfp4_mixed", "until": 3}, {"recipe": "bf16_mixed"}]
"""Emulated NVFP4, then BF16."""
NAMES = ["bf16_with_nvfp4_mixed"] * 3 + ["bf16_mixed"] * 3


class Around(Hook):
    """Main weights and moments behind the last step of a stage, and in the engine that follows."""

    def __init__(self):
        self.before, self.after, self.calls = {}, {}, []

    def built(self, training):
        self.calls.append(training.run.recipe)

    def stepped(self, training, result):
        if training.counters.iteration == 3:
            self.before = values(training)

    def started(self, training):
        if training.counters.iteration == 3:
            self.after = values(training)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The scheduled run in one piece: what was seen, what a hook kept around its switch, and its folder."""
    around, folder = Around(), tmp_path_factory.mktemp("whole")
    return go(run(LIST, emulate=True, logger={"log_dir": str(folder)}), around), around, folder


def test_the_switch_is_at_its_step_and_loses_nothing(whole):
    watch, around, folder = whole
    assert watch.recipes == NAMES
    assert around.calls == [NAMES[0], NAMES[-1]]  # hooks, the audit among them, see the new engine too
    assert around.before.keys() == around.after.keys()
    assert all((around.before[name] == around.after[name]).all() for name in around.before)
    event = json.loads((folder / EVENTS).read_text())
    found = tuple(event[name] for name in ("event", "iteration", "before", "after", "verdict"))
    assert found == ("recipe", 3, NAMES[0], NAMES[-1], "safe")
    assert not [file for file in folder.iterdir() if file.name.startswith(".switch")]


def test_a_stage_is_the_recipe_alone_from_the_same_state(whole, tmp_path):
    # what follows the switch is what a run in that recipe, resumed from that state, does
    kept = {"checkpoint": {"save": str(tmp_path)}, "train": {"exit_interval": 3}}
    go(run("bf16_with_nvfp4_mixed", emulate=True, **kept))
    accepted = {"load": str(tmp_path), "accept": "bf16_with_nvfp4_mixed"}
    alone = go(run("bf16_mixed", emulate=True, checkpoint=accepted))
    assert {step: whole[0].losses[step] for step in (4, 5, 6)} == alone.losses


@pytest.mark.parametrize("at", [2, 5], ids=["before the switch", "behind the switch"])  # at it: two ranks, below
def test_a_scheduled_run_is_resumed_on_either_side_to_the_bit(whole, tmp_path, at):
    first = go(run(LIST, emulate=True, checkpoint={"save": str(tmp_path / "kept")}, train={"exit_interval": at}))
    place = tmp_path / "kept"
    if at == 5:  # a checkpoint may be renamed
        place = store.locate(place).rename(tmp_path / "best")
    second = go(run(LIST, emulate=True, checkpoint={"load": str(place)}))
    assert whole[0].losses == first.losses | second.losses
    assert whole[0].digest == second.digest
    assert first.recipes + second.recipes == NAMES


def test_a_switch_between_layouts_keeps_main_weights():
    around = Around()
    watch = go(run([{"recipe": "fp32", "until": "50%"}, {"recipe": "bf16_mixed"}]), around)
    assert watch.recipes == ["fp32"] * 3 + ["bf16_mixed"] * 3
    assert all((around.before[name] == around.after[name]).all() for name in around.before)


def test_delayed_scaling_comes_and_goes(tmp_path):
    part = {"recipe": "bf16_with_fp8_delayed_scaling_mixed", "fp8_param_gather": False, "fp8_amax_history_len": 4}
    stages = [{"recipe": "bf16_mixed", "until": 2}, part | {"until": 4}, {"recipe": "bf16_mixed"}]
    watch = go(run(stages, emulate=True, logger={"log_dir": str(tmp_path)}))
    assert [json.loads(line)["verdict"] for line in (tmp_path / EVENTS).read_text().splitlines()] == ["safe", "lossy"]
    assert watch.losses[6] < watch.losses[1]
    assert "emulation" in watch.summary.notes  # though the first stage quantizes nothing


def test_two_ranks_switch_together(tmp_path):
    spec = {"recipe": LIST, "emulate": True, "ddp": {"use_distributed_optimizer": True}}
    kept = {"checkpoint": {"save": str(tmp_path / "kept"), "load": str(tmp_path / "kept")}}
    whole, first, second = job(2, tmp_path, spec, spec | kept | {"train": {"exit_interval": 3}}, spec | kept)
    assert whole["recipes"] == NAMES
    assert whole["losses"] == first["losses"] | second["losses"]
    assert whole["digests"] == second["digests"]


def test_every_stage_is_checked_before_step_0(tmp_path):
    stages = [{"recipe": "fp32", "until": 2}, {"recipe": "full_bf16"}]
    bad = run(stages, ddp={"use_distributed_optimizer": True}, checkpoint={"save": str(tmp_path)})
    with pytest.raises(Refused, match=r"(?s)stage 2 \(full_bf16\).*distributed"):
        go(bad)
    assert not store.saved(tmp_path)


def test_a_later_stage_that_this_machine_cannot_run_is_refused_at_start():
    with pytest.raises(Refused, match=r"(?s)stage 2 \(bf16_with_nvfp4_mixed\).*emulate"):
        go(run([{"recipe": "bf16_mixed", "until": 2}, {"recipe": "bf16_with_nvfp4_mixed"}]))


def test_stages_that_do_not_fit_the_run_are_refused():
    with pytest.raises(Contradiction, match="after the run's last step"):
        go(run([{"recipe": "fp32", "until": 200}, {"recipe": "bf16_mixed"}]))


class Scales(Hook):
    """Recipe and loss scale of every step, and the calls that come with another engine."""

    def __init__(self):
        self.seen, self.built_for = [], []

    def built(self, training):
        self.built_for.append(training.run.recipe)

    def stepping(self, training):
        self.seen.append((training.run.recipe, float(training.engine.optimizer.get_loss_scale())))


def test_a_rollback_past_a_switch_loses_nothing(tmp_path):
    stages = [{"recipe": "fp16_mixed", "initial_loss_scale": 4096.0, "until": 4}, {"recipe": "bf16_mixed"}]
    kept, log = {"save": str(tmp_path / "kept"), "save_interval": 3}, {"log_dir": str(tmp_path)}
    scales = Scales()
    watch = go(run(stages, train={"nonfinite": "rollback 1"}, checkpoint=kept, logger=log), scales, Poison(6))
    events = [json.loads(line) for line in (tmp_path / EVENTS).read_text().splitlines()]
    (text,) = [event["text"] for event in events if event["event"] == "rollback"]
    assert "rolled back to step_00000003, continuing" in text
    assert scales.built_for == ["fp16_mixed", "bf16_mixed"] * 2
    assert [scale for recipe, scale in scales.seen if recipe == "fp16_mixed"] == [4096.0] * 5
    assert watch.summary.consumed_samples == 9 * 4
    switches = {name: told for name, told in watch.summary.notes.items() if name.startswith("recipe from")}
    assert switches == {"recipe from step 5": "bf16_mixed"}


def test_a_rollback_past_a_switch_in_the_step_that_ends_the_run_keeps_the_place_in_the_data(tmp_path):
    stages = [{"recipe": "fp16_mixed", "initial_loss_scale": 4096.0, "until": 4}, {"recipe": "bf16_mixed"}]
    kept = {"save": str(tmp_path), "load": str(tmp_path), "save_interval": 3}
    train = {"nonfinite": "rollback 1", "exit_interval": 6}
    watch = go(run(stages, iters=8, train=train, checkpoint=kept), Poison(6))
    assert watch.summary.consumed_samples == 6 * 4
    place = store.locate(tmp_path)
    assert (place.name, read_fingerprint(place).recipe) == ("step_00000003", "fp16_mixed")
    assert not [name for name in watch.summary.notes if name.startswith("recipe from")]  # the switch was undone
    assert '"grad_scaler"' in (place / "state.json").read_text()
    assert go(run(stages, iters=8, checkpoint=kept)).summary.consumed_samples == (6 + 5) * 4


def test_a_schedule_begins_with_the_weights_of_another_program(tmp_path):
    go(run("fp32", iters=2, checkpoint={"save": str(tmp_path)}))
    place = store.locate(tmp_path)
    write_whole(place / store.MANIFEST, json.dumps(store.read_manifest(place) | {"foreign": True}))
    stages = [{"recipe": "fp32", "until": 1}, {"recipe": "bf16_mixed"}]
    watch = go(run(stages, iters=2, checkpoint={"load": str(place), "reset_optimizer": True}))
    assert watch.recipes == ["fp32", "bf16_mixed"]


def test_a_later_stage_says_its_warnings_at_start():
    stages = [{"recipe": "fp32_params_bf16_compute", "until": 1}, {"recipe": "full_bf16"}]
    made = run(stages, iters=2, engine="fsdp2")
    _, second, warning, _ = lines = checkpointer.check_stages(made)
    assert second.startswith("stage 2: full_bf16")
    assert warning.startswith("  warning moments-follow-16-bit-parameters: ")
    later = made.at(1)
    _, shown = require_here(later.policy, later.facts)
    assert checkpointer.check_stages(made, said=shown) == [line for line in lines if line != warning]


def test_each_transition_is_told():
    first = {"recipe": "bf16_with_fp8_delayed_scaling_mixed", "fp8_param_gather": False, "until": 4}
    made = run([first, {"recipe": "bf16_mixed"}], emulate=True)
    assert checkpointer.check_stages(made) == [
        "stage 1: bf16_with_fp8_delayed_scaling_mixed, steps 1 to 4",
        "stage 2: bf16_mixed, steps 5 to 6",
        "  then bf16_with_fp8_delayed_scaling_mixed -> bf16_mixed: lossy (lost: amax history of delayed scaling (1024 steps))",
    ]
