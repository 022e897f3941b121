"""Interrupted and resumed is uninterrupted, to the bit; and every verdict is true of the run that follows."""

from __future__ import annotations

import functools
import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from mpbridge.common.errors import Contradiction, Refused
from mpbridge.observe.diagnose.diagnosis import diagnose
from mpbridge.precision.registry import get_mixed_precision_config, recipes
from mpbridge.training.checkpoint import io as checkpoint
from mpbridge.training.checkpoint import store
from mpbridge.training.checkpoint.format import decoded
from mpbridge.training.checkpoint.verdict import read_fingerprint, verdict
from tests.backend.engines.test_emerging import KINDS, NEEDS
from tests.training.survival import Hook, Loses, go, job, run

DIST = {"use_distributed_optimizer": True}
FP16 = {"recipe": "fp16_mixed", "initial_loss_scale": 4096.0}
DELAYED = {"recipe": "bf16_with_fp8_delayed_scaling_mixed", "fp8_param_gather": False, "fp8_amax_history_len": 4}
SGD = {"optimizer": "sgd", "sgd_momentum": 0.9}
STILL = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


AT_3 = {"save_interval": 3, "keep_last": 2}


def broken_off(folder: Path, recipe, **sections):
    """A run that saves behind step 3 and goes on, and one that goes on from that checkpoint."""
    kept = {"save": str(folder), **AT_3} | sections.pop("checkpoint", {})
    whole = go(run(recipe, checkpoint=kept, **sections))
    return whole, go(run(recipe, checkpoint={"load": str(folder / "step_00000003")}, **sections))


def same_from_step_4(whole, second):
    for name in ("losses", "scales"):
        before, after = getattr(whole, name), getattr(second, name)
        assert {step: before[step] for step in (4, 5, 6)} == after
    assert whole.digest == second.digest


@pytest.mark.parametrize(
    ("recipe", "sections"),
    [
        pytest.param("fp32", {}, id="fp32"),
        pytest.param("fp16_mixed", {}, id="fp16 while every step is skipped"),
        pytest.param("bf16_mixed", {"checkpoint": {"async_save": True}}, id="bf16 in the background"),
        pytest.param("bf16_with_nvfp4_mixed", {"emulate": True, "ddp": DIST}, id="nvfp4 emulated, stochastic rounding"),
        pytest.param("bf16_params_fp32_states", {"engine": "fsdp2"}, id="fsdp2"),
        pytest.param("bf16_megatron_fsdp", {"engine": "megatron_fsdp"}, id="megatron-fsdp"),
        pytest.param("bf16_mixed", {"optimizer": SGD}, id="sgd"),
        pytest.param("fp32", {"optimizer": SGD, "engine": "fsdp2"}, id="sgd on fsdp2", marks=pytest.mark.slow),
        pytest.param("fp32_params_bf16_compute", {"optimizer": {"optimizer": "muon"}, "engine": "fsdp2"}, id="muon"),
        pytest.param(
            "bf16_mixed",
            {"optimizer": {"optimizer": "dist_muon"}},
            id="dist_muon",
            marks=pytest.mark.skipif(
                find_spec("emerging_optimizers") is None, reason="needs Emerging-Optimizers v0.1.0"
            ),
        ),
        *(
            pytest.param("bf16_mixed", {"optimizer": {"optimizer": name}}, id=f"{name} of core", marks=NEEDS)
            for name in KINDS
        ),
    ],
)
def test_resumed_is_uninterrupted_to_the_bit(tmp_path, recipe, sections):
    # over the distributed optimizer: PAIRS, on two ranks
    whole, second = broken_off(tmp_path, recipe, **sections)
    same_from_step_4(whole, second)
    assert "optimizer states" not in second.summary.notes, "no moment was lost"
    assert len(set(whole.losses.values())) == 6


def values(training):
    """'role name' -> FP32 values of main weights (the parameters themselves where there are none) and moments."""
    from mpbridge.backend.engines.optimizers import join

    live = list(training.engine.tensors())
    found = {}
    for one in live:
        if one.role == "params":
            found.setdefault(f"main {one.parameter}", one.tensor.detach().float().flatten().clone())
    params = {one.parameter: one.tensor.detach() for one in live if one.role == "params"}
    for one in live:
        if one.role == "main_params":
            whole = one.tensor.detach().flatten()
            halves = whole.dtype is torch.int16
            whole = join(params[one.parameter].flatten(), whole) if halves else whole.float()
            found[f"main {one.parameter}"] = whole.clone()
        elif one.role in ("exp_avg", "exp_avg_sq"):
            found[f"{one.role} {one.parameter}"] = one.tensor.detach().float().flatten().clone()
    return found


class Grab(Hook):
    """Values behind step 3 of the run that is saved, or as they are after loading."""

    def started(self, training):
        self.loaded = values(training)

    def stepped(self, training, result):
        if training.counters.iteration == 3:
            self.saved = values(training)


EXACT = {"main", "exp_avg", "exp_avg_sq"}


def still(spec, **sections):
    """A run of five steps; a recipe's name with '+': over the distributed optimizer."""
    plus = isinstance(spec, str) and spec.endswith("+")
    name = spec.removesuffix("+") if isinstance(spec, str) else spec
    return run(name, iters=5, model=STILL, emulate=True, **({"ddp": DIST} if plus else {}), **sections)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Recipe -> the folder of its checkpoint behind step 3, the values there, and the losses of the run that goes on."""
    folders = tmp_path_factory.mktemp("begun")

    @functools.cache
    def begin(name):
        spec = DELAYED if name == "delayed" else FP16 if name == "fp16" else name
        grab, folder = Grab(), folders / name
        return folder, grab, go(still(spec, checkpoint={"save": str(folder), **AT_3}), grab).losses

    return begin


@pytest.mark.parametrize(
    ("before", "after", "kind", "exact"),
    [
        pytest.param("fp32", "bf16_mixed", "safe", EXACT, id="fp32 to bf16"),
        pytest.param("bf16_mixed", FP16, "safe", EXACT, id="bf16 to fp16"),
        pytest.param("fp16", "bf16_mixed", "lossy", EXACT, id="fp16 to bf16: the scaler is lost"),
        pytest.param("bf16_mixed", "bf16_mixed+", "safe", EXACT, id="to the distributed optimizer"),
        pytest.param("bf16_mixed+", "fp32", "safe", EXACT, id="from the distributed optimizer"),
        pytest.param("bf16_mixed_bf16_moments+", "bf16_mixed", "safe", EXACT, id="remainders and moments widened"),
        pytest.param("bf16_mixed", "bf16_mixed_bf16_moments+", "lossy", {"main"}, id="moments alone narrowed"),
        pytest.param("fp32", "full_bf16", "lossy", set(), id="main weights narrowed"),
        pytest.param("bf16_mixed", "bf16_with_fp8_subchannel_scaling_mixed", "safe", EXACT, id="bf16 to blockwise fp8"),
        pytest.param("delayed", "bf16_mixed", "lossy", EXACT, id="delayed to bf16: the history is lost"),
        pytest.param("delayed", DELAYED | {"fp8_amax_history_len": 8}, "lossy", EXACT, id="another length of history"),
        pytest.param("fp32_params_bf16_compute", "bf16_params_fp32_states", "safe", EXACT, id="fsdp2: another Adam"),
        pytest.param("fp32_params_bf16_compute", "bf16_megatron_fsdp", "safe", EXACT, id="fsdp2 to megatron-fsdp"),
    ],
)
def test_verdicts_are_true_of_the_run(begun, before, after, kind, exact):
    folder, first, reference = begun(before)
    place = folder / "step_00000003"
    saved, second = read_fingerprint(place), Grab()
    resumed = still(after, checkpoint={"load": str(place), "accept": saved.recipe})
    said = verdict(saved, checkpoint.of_run(resumed))
    assert said.kind == kind
    watch = go(resumed, second)
    worst = {}
    for name, value in first.saved.items():
        role = name.partition(" ")[0]
        worst[role] = max(worst.get(role, 0.0), float((value - second.loaded[name]).abs().max()))
    assert {role for role, difference in worst.items() if difference == 0.0} == exact
    # goes on where it was: a run that lost its place would start at the first loss, log 64 = 4.16
    assert sorted(watch.losses) == [4, 5]
    for step, loss in watch.losses.items():
        assert abs(loss - reference[step]) < 0.03, (watch.losses, reference)


def test_moments_that_are_lost_behind_a_resume_are_said_by_the_run_and_named_by_its_diagnosis(tmp_path):
    kept = {"save": str(tmp_path / "saved"), "load": str(tmp_path / "saved")}
    log = {"log_dir": str(tmp_path / "run"), "precision_every": 0}
    go(run("bf16_mixed", checkpoint=kept, train={"exit_interval": 3}, logger=log))
    # an audit would stop the run at its first step
    second = go(run("bf16_mixed", checkpoint=kept, logger=log, train={"audit": "warn"}), Loses())
    assert second.summary.notes["optimizer states"] == "lost at the resume"
    found = diagnose(tmp_path / "run")
    # the audit of the first step after it saw moments that do not follow from those before
    assert [one.cause for one in found.suspects] == ["bad-resume", "not-as-promised"]
    assert "states were lost between the file and the first step" in found.suspects[0].evidence[-1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a run that saved behind its only step; for tests that write nothing into it."""
    folder = tmp_path_factory.mktemp("saved")
    go(run("bf16_mixed", iters=1, checkpoint={"save": str(folder)}))
    return folder


def test_weights_only_needs_to_be_asked_for(begun):
    place = str(begun("bf16_mixed")[0] / "step_00000003")
    with pytest.raises(Refused, match="--reset-optimizer"):
        go(run("bf16_mixed", checkpoint={"load": place}, optimizer=SGD))
    watch = go(run("bf16_mixed", checkpoint={"load": place, "reset_optimizer": True}, optimizer=SGD))
    assert sorted(watch.losses) == [4, 5, 6]
    assert watch.losses[4] < 4.0  # the weights were taken over


def test_weights_alone_are_said_where_they_were_asked_for(saved):
    made = run("bf16_mixed", checkpoint={"load": str(saved)})
    found = read_fingerprint(store.locate(saved))
    assert checkpoint.judge(found, made, saved, reset=False).kind == "same"
    asked = checkpoint.judge(found, made, saved, reset=True)
    assert (asked.kind, asked.lost) == ("weights only", ("optimizer states and their step count",))


def names(folder):
    return sorted(entry.name.partition("-")[0] for entry in folder.iterdir() if not entry.name.startswith("."))


def test_going_on_from_an_older_checkpoint_sets_the_newer_ones_aside(tmp_path):
    kept = {"save": str(tmp_path), "save_interval": 1, "keep_last": 3}
    go(run("bf16_mixed", iters=6, checkpoint=kept))
    older = kept | {"load": str(tmp_path / "step_00000004"), "keep_last": 1}
    go(run("bf16_mixed", iters=6, checkpoint=older, train={"exit_interval": 5}))
    assert names(tmp_path) == ["aside", "aside", "latest", "step_00000005"]
    # and what was set aside still is a checkpoint
    aside = next(tmp_path.glob("aside-step_00000005-*"))
    assert sorted(go(run("bf16_mixed", iters=6, checkpoint={"load": str(aside)})).losses) == [6]


def test_a_kill_while_a_step_is_saved_again_leaves_the_old_one_to_resume_from(tmp_path, monkeypatch):
    """Where the file system exchanges no names: between the two renames no folder has the step's own name."""
    kept = {"save": str(tmp_path), "load": str(tmp_path), "save_interval": 2}
    go(run("bf16_mixed", iters=2, checkpoint=kept))
    partial = store.begin(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(store, "_exchanged", lambda *_: False)
        patch.setattr(
            Path, "rename", lambda path, to: pytest.fail("killed") if path == partial else Path(shutil.move(path, to))
        )
        with pytest.raises(pytest.fail.Exception, match="killed"):
            store.seal(partial, 2)
    assert not (tmp_path / "step_00000002").exists()
    resumed = go(run("bf16_mixed", iters=4, checkpoint=kept))
    assert sorted(resumed.losses) == [3, 4]
    assert sorted(os.listdir(tmp_path)) == [store.WRITER, "latest", "step_00000002", "step_00000004"]


def test_a_folder_that_holds_a_run_is_not_written_over_by_a_new_one_or_one_from_elsewhere(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "two", symlinks=True)
    for load in ({}, {"load": str(saved)}):
        with pytest.raises(Contradiction, match=r"two already has a run"):
            go(run("bf16_mixed", iters=2, checkpoint=load | {"save": str(tmp_path / "two")}))


def test_another_model_is_refused_before_anything_is_read(saved):
    with pytest.raises(Refused, match="hidden_size is 64 in the checkpoint and 32 in the run"):
        go(run("bf16_mixed", checkpoint={"load": str(saved)}, model={"hidden_size": 32}))


def test_another_recipe_needs_a_word_of_consent_before_anything_is_built(saved, monkeypatch):
    monkeypatch.setattr("mpbridge.training.loop.build_engine", lambda run: pytest.fail("it was built"))
    words = r"saved under bf16_mixed and this run has fp16_mixed.* up to \d+ steps are skipped.*checkpoint\.accept=bf16_mixed"
    for accept, also in (None, "$"), ("fp32", r", where checkpoint\.accept=fp32 names another recipe"):
        with pytest.raises(Contradiction, match=words + also):
            go(run("fp16_mixed", iters=2, checkpoint={"load": str(saved), "accept": accept}))
    monkeypatch.undo()
    for word in ({"accept": "bf16"}, {"reset_optimizer": True}):
        assert sorted(go(run(FP16, iters=2, checkpoint={"load": str(saved)} | word)).losses) == [2]


def test_the_config_and_the_fingerprint_are_inside(tmp_path):
    from mpbridge.settings.container import ConfigContainer

    made = run("bf16_mixed_bf16_moments", iters=1, ddp=DIST, checkpoint={"save": str(tmp_path)})
    go(made)
    place = store.locate(tmp_path)
    assert ConfigContainer.load(place / store.CONFIG) == made.container
    assert read_fingerprint(place).stored == {
        "exp_avg": "float32", "exp_avg_sq": "float32", "main_params": "float32", "params": "bfloat16",
    }  # fmt: skip


PAIRS = {
    "fp32": ("fp32", {}),
    "bf16 in the background": ("bf16_mixed", {"checkpoint": {"async_save": True}}),
    "fp16": (FP16, {}),
    "moments and remainders": ("bf16_mixed_bf16_moments", {}),
    "fp8 delayed emulated": (DELAYED, {"emulate": True}),
}
RESHARD = {"model": STILL | {"num_layers": 2}}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Name -> what two ranks saw of each run; one job for all, since starting one costs more than its steps."""
    folder = tmp_path_factory.mktemp("two")
    specs = {}
    for name, (recipe, spec) in PAIRS.items():
        place = str(folder / name.replace(" ", "_"))
        kept = {"checkpoint": {"save": place, **AT_3} | spec.get("checkpoint", {})}
        base = {"recipe": recipe, "ddp": DIST} | {key: value for key, value in spec.items() if key != "checkpoint"}
        specs[name, "whole"] = base | kept
        specs[name, "second"] = base | {"checkpoint": {"load": f"{place}/step_00000003"}}
    third = {"checkpoint": {"load": str(folder / "fp32" / "step_00000003")}}
    lost = {"recipe": "fp32", "ddp": DIST, "hooks": [Loses()], "train": {"audit": "warn"}}
    specs["fp32", "lost"] = lost | third
    base, load = {"recipe": "fp32"} | RESHARD, {"checkpoint": {"load": str(folder / "tensor" / "step_00000003")}}
    tensor, pipeline = ({"parallel": {f"{kind}_model_parallel_size": 2}} for kind in ("tensor", "pipeline"))
    specs |= {
        ("reshard", "whole"): base | tensor | {"checkpoint": {"save": str(folder / "tensor"), **AT_3}},
        ("reshard", "pipeline"): base | pipeline | load,
        ("reshard", "data"): base | {"ddp": DIST} | load,
    }
    return folder, dict(zip(specs, job(2, folder, *specs.values()), strict=True))


@pytest.mark.parametrize("name", PAIRS)
def test_two_ranks_with_the_distributed_optimizer_resume_to_the_bit(two, name):
    whole, second = (two[1][name, part] for part in ("whole", "second"))
    assert {step: whole["losses"][step] for step in "456"} == second["losses"]
    assert whole["digests"] == second["digests"]
    assert len(set(whole["digests"])) == 2  # each rank has its own shard
    assert "optimizer states" not in second["notes"], "no moment was lost"


def test_two_ranks_say_that_their_moments_are_lost_by_the_mean_of_both_shards(two):
    folder, seen = two
    notes = seen["fp32", "lost"]["notes"]
    assert notes["optimizer states"] == "lost at the resume"
    state = decoded(json.loads((folder / "fp32" / "step_00000003" / "state.json").read_text()))
    assert state["run"]["second_moment"] == pytest.approx(notes["mean second moment"], rel=1e-12)


def test_a_tensor_parallel_checkpoint_goes_on_in_any_layout(two):
    folder, seen = two
    alone = go(run("fp32", checkpoint={"load": str(folder / "tensor" / "step_00000003")}, **RESHARD)).losses
    whole = seen["reshard", "whole"]["losses"]
    others = (seen["reshard", layout]["losses"] for layout in ("pipeline", "data"))
    for losses in (*others, {str(step): loss for step, loss in alone.items()}):
        assert sorted(losses) == ["4", "5", "6"]
        # fp32 sums in another order: a few units in the last place of losses near 4
        assert all(abs(loss - whole[step]) < 1e-6 for step, loss in losses.items()), (losses, whole)


class Payload:
    """Stands for a class that no optimizer is of."""


def test_bare_remainders_as_transformer_engine_hands_them_out_are_kept_whole(tmp_path, monkeypatch):
    from mpbridge.backend.engines.optimizers import CpuFusedAdam
    from mpbridge.training.checkpoint import state

    whole_get, whole_set = CpuFusedAdam.get_unscaled_state, CpuFusedAdam.set_scaled_state

    def get(self, param, name):  # fused_adam.py 2.11: int16 as it is
        stored = self.state[param][name]
        return stored if stored.dtype is torch.int16 else whole_get(self, param, name)

    def put(self, param, name, value):  # and int16 is all that is taken back
        assert value.dtype is (torch.int16 if self._is_remainder(param, name) else torch.float32)
        whole_set(self, param, name, value)

    monkeypatch.setattr(CpuFusedAdam, "get_unscaled_state", get)
    monkeypatch.setattr(CpuFusedAdam, "set_scaled_state", put)
    monkeypatch.setattr(state, "CpuFusedAdam", Payload)
    same_from_step_4(*broken_off(tmp_path, "bf16_mixed_bf16_moments", ddp=DIST))


ALL = [name for name in recipes if recipes[name].engine is None and not name.startswith("nemotron_3")]
"""(Nemotron 3's 14 BF16 layers need a deeper model than these.)"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_pair_of_recipes_goes_on_as_its_verdict_says(tmp_path):
    def made(name, **sections):
        wide = {"num_layers": 6, "ffn_hidden_size": 256} | STILL
        changes = {"fp8_param_gather": False} if get_mixed_precision_config(name).fp8_param_gather else {}
        changes |= {"reuse_grad_buf_for_mxfp8_param_ag": False, "fp8_amax_history_len": 4} if changes else {}
        changes |= {"initial_loss_scale": 4096.0} if name.startswith("fp16") else {}
        dist = {"ddp": DIST} if name == "bf16_mixed_bf16_moments" else {}
        return run({"recipe": name} | changes, iters=4, model=wide, emulate=True, **dist, **sections)

    seen = set()
    saved = {}
    for name in ALL:
        grab = Grab()
        go(made(name, checkpoint={"save": str(tmp_path / name)}, train={"exit_interval": 3}), grab)
        saved[name] = grab.saved
    for before in ALL:
        for after in ALL:
            resumed = made(after, checkpoint={"load": str(tmp_path / before), "accept": before})
            said = verdict(read_fingerprint(store.locate(tmp_path / before)), checkpoint.of_run(resumed))
            grab = Grab()
            losses = go(resumed, grab).losses
            seen.add(said.kind)
            assert said.goes_on
            assert list(losses) == [4]
            lost = " ".join(said.lost)
            roles = {"main": "main weights", "exp_avg": "first moments", "exp_avg_sq": "second moments"}
            for role, text in roles.items():
                held = {key: value for key, value in saved[before].items() if key.startswith(f"{role} ")}
                same = all((value == grab.loaded[key]).all() for key, value in held.items())
                assert same == (text not in lost), (before, after, role, said)
    assert seen == {"same", "safe", "lossy"}


def test_one_command_begins_with_the_weights_of_another_run_and_goes_on_with_its_own(tmp_path):
    first = go(run("bf16_mixed", iters=2, checkpoint={"save": str(tmp_path / "first")}))
    own = {way: str(tmp_path / "own") for way in ("save", "load")} | {"pretrained_checkpoint": str(tmp_path / "first")}
    begun = go(run("bf16_mixed", iters=1, checkpoint=own))
    assert sorted(begun.losses) == [1]  # steps count from 0
    assert begun.losses[1] != first.losses[1]
    assert sorted(go(run("bf16_mixed", iters=2, checkpoint=own)).losses) == [2]
