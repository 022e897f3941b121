"""What a run asks of its schedule and optimizer holds behind a resume, and an evaluation changes nothing of the steps behind it."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace

import pytest
import torch

from mpbridge.backend.engines.base import amaxes_kept
from mpbridge.common.errors import CheckpointError, Contradiction
from mpbridge.training import checkpointer
from mpbridge.training.process import process_group, with_weights
from tests.training.checkpoint.test_resume import DELAYED, DIST
from tests.training.survival import Hook, go, run


class Evaluates(Hook):
    """Measures a loss behind every step."""

    def stepped(self, training, result):
        training.engine.evaluate(training.feed.batches("train", 100), microbatches=1)


def test_an_evaluation_changes_nothing_of_the_steps_behind_it(tmp_path):
    # so that a run that resumes from a checkpoint saved before it goes on to the bit
    assert go(run(DELAYED, emulate=True), Evaluates()).losses == go(run(DELAYED, emulate=True)).losses


class Interrupts(Hook):
    """Measures losses behind every step that end in an error."""

    def stepped(self, training, result):
        batches = iter([next(training.feed.batches("train", 100))])
        with pytest.raises(StopIteration):
            training.engine.evaluate(batches, microbatches=2)


def test_neither_does_one_that_ends_in_an_error(tmp_path):
    assert go(run(DELAYED, emulate=True), Interrupts()).losses == go(run(DELAYED, emulate=True)).losses


def test_amax_histories_are_put_back_wherever_transformer_engine_keeps_them():
    def module(**kept):
        made = torch.nn.Identity()
        vars(made).update(kept)
        return made

    # a state of the fuser's operations is named as in ops/op.py of 2.11 and 2.20, one of CustomRecipe has no history (quantization.py of 2.20)
    tables = [SimpleNamespace(amax_history=torch.ones(3, 2)) for _ in range(3)]
    chunk = torch.nn.Sequential(
        module(fp8_meta={"scaling_fwd": tables[0]}),
        module(_fp8_metas={"forward": {"scaling_fwd": tables[1]}, "backward": None}),
        module(fp8_meta={"scaling_fwd": SimpleNamespace(amax_history=None)}),
        module(_fp8_metas=None),
        module(fp8_meta={}),
    )

    def evaluate():
        for table in tables:
            table.amax_history[0] += 3
        chunk[4].fp8_meta["scaling_fwd"] = tables[2]  # made by the evaluation
        raise KeyError("in the middle")

    with pytest.raises(KeyError, match="in the middle"), amaxes_kept([chunk]):
        evaluate()
    assert [table.amax_history[:, 0].tolist() for table in tables] == [[1, 1, 1], [1, 1, 1], [0, 1, 1]]


def test_another_schedule_is_an_error_that_names_the_cure(tmp_path):
    go(run("bf16_mixed", iters=1, checkpoint={"save": str(tmp_path)}))
    cure = r"to keep the checkpoint's: scheduler\.lr_decay_iters=\d+; .*scheduler\.override_opt_param_scheduler=true"
    again = functools.partial(run, "bf16_mixed", iters=2, checkpoint={"load": str(tmp_path)})
    with pytest.raises(Contradiction, match=cure) as found:
        go(again(scheduler={"lr_decay_iters": 50}))
    kept = int(re.search(r"lr_decay_iters=(\d+)", str(found.value))[1])
    assert go(again(scheduler={"lr_decay_iters": kept})).losses
    assert go(again(scheduler={"lr_decay_iters": 50, "override_opt_param_scheduler": True})).losses


class Rates(Hook):
    """Learning rate, weight decay and betas of every step."""

    def __init__(self):
        self.seen = {}

    def stepping(self, training):
        group = training.engine.optimizer.param_groups[0]
        self.seen[training.counters.iteration + 1] = (group["lr"], group["weight_decay"], group.get("betas"))


@pytest.mark.parametrize(("engine", "recipe"), [("mcore", "bf16_mixed"), ("fsdp2", "fp32_params_bf16_compute")])
def test_rates_and_betas_behind_a_resume_are_the_ones_that_were_asked_for(tmp_path, engine, recipe):
    def seen(load, rate, **scheduler):
        rates, named = Rates(), {"lr_decay_style": "linear", "lr_decay_iters": 10, "lr_warmup_iters": 0} | scheduler
        optimizer = {"lr": rate, "min_lr": rate / 2, "weight_decay": rate * 10, "adam_beta2": 0.9 + rate}
        kept = {"load": str(tmp_path)} if load else {"save": str(tmp_path)}
        go(
            run(recipe, iters=4 if load else 2, engine=engine, optimizer=optimizer, scheduler=named, checkpoint=kept),
            rates,
        )
        return rates.seen

    seen(False, 4e-3)
    for word, rate in (("override", 2e-3), ("use_checkpoint", 4e-3)):
        found = seen(True, 2e-3, **{f"{word}_opt_param_scheduler": True})
        # linear from `rate` to its half in 10 steps, of which 2 and 3 are done
        assert {step: lr for step, (lr, _, _) in found.items()} == pytest.approx({3: 0.9 * rate, 4: 0.85 * rate})
        assert [decay for _, decay, _ in found.values()] == pytest.approx([rate * 10] * 2)
        assert {betas for _, _, betas in found.values()} == {(0.9, 0.902)}, "no part of the schedule"


WSD = {
    "lr_decay_style": "WSD",
    "lr_wsd_decay_iters": 3,
    "lr_decay_iters": 10,
    "lr_warmup_iters": 0,
    "lr_wsd_decay_style": "linear",
}
COSINE = {"lr_decay_iters": 10, "lr_warmup_iters": 0}


def test_a_schedule_that_ends_with_a_decay_of_its_own_is_taken_up_and_kept(tmp_path):
    go(run(iters=8, checkpoint={"save": str(tmp_path)}, scheduler=WSD))

    def rates(**scheduler):
        seen = Rates()
        go(run(iters=10, checkpoint={"load": str(tmp_path)}, scheduler=COSINE | scheduler), seen)
        return {step: rate for step, (rate, _, _) in seen.seen.items()}

    decays = pytest.approx({9: 1e-3 * 2 / 3, 10: 1e-3 / 3})  # the last 3 of 10 steps, linear from 1e-3 to 0
    assert rates(use_checkpoint_opt_param_scheduler=True) == decays
    with pytest.raises(Contradiction, match=r"scheduler\.lr_wsd_decay_iters 3 -> None") as found:
        rates()
    kept = re.search(r"to keep the checkpoint's: (.*?);", str(found.value))[1].split()
    words = dict(word.removeprefix("scheduler.").split("=") for word in kept)
    assert words == {"lr_decay_style": "WSD", "lr_wsd_decay_iters": "3", "lr_wsd_decay_style": "linear"}
    assert rates(**words | {"lr_wsd_decay_iters": 3}) == decays


def test_a_schedule_of_an_older_file_without_the_length_of_its_decay_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("mpbridge.training.checkpoint.io.UNSAVED", ())
    go(run(iters=8, checkpoint={"save": str(tmp_path)}, scheduler=WSD))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"set scheduler\.lr_wsd_decay_iters"):
        go(
            run(
                iters=10,
                checkpoint={"load": str(tmp_path)},
                scheduler=COSINE | {"use_checkpoint_opt_param_scheduler": True},
            )
        )


class Groups(Hook):
    """(rate, steps counted) of the output layer's group and of another, at the start of every step."""

    def __init__(self):
        self.seen = {}

    def stepping(self, training):
        groups = training.engine.optimizer.param_groups
        self.seen[training.counters.iteration + 1] = [
            (g["lr"], g.get("step")) for g in groups if g["wd_mult"] and g["params"]
        ]


@pytest.mark.parametrize(("recipe", "ddp"), [("bf16_mixed", {}), ("bf16_mixed", DIST), ("fp32", {})])
@pytest.mark.parametrize("had", [{}, {"decoupled_lr": 5e-4}])
def test_a_rate_of_its_own_for_the_output_layer_holds_behind_a_resume(tmp_path, recipe, ddp, had):
    steady = functools.partial(run, recipe, ddp=ddp, scheduler={"lr_decay_style": "constant", "lr_warmup_iters": 0})
    go(steady(iters=2, optimizer=had, checkpoint={"save": str(tmp_path)}))
    groups = Groups()
    go(steady(iters=3, optimizer={"decoupled_lr": 5e-4}, checkpoint={"load": str(tmp_path)}), groups)
    assert sorted(groups.seen[3]) == [(5e-4, 2), (1e-3, 2)]


def test_an_engine_takes_the_weights_of_a_run_alone(tmp_path):
    go(run(iters=2, checkpoint={"save": str(tmp_path)}))
    with process_group(False), with_weights(run(iters=2), tmp_path / "step_00000002", cuda=False) as engine:
        assert engine.named_parameters()


class Wrong(Hook):
    """Loading leaves one weight as it was initialised."""

    def built(self, training):
        load = training.engine.load_state
        parameter = next(iter(training.engine.named_parameters()))[1].detach()
        before = parameter.clone()

        def other(state, **named):
            load(state, **named)
            parameter.copy_(before)

        training.engine.load_state = other


def test_what_is_set_otherwise_is_noted_and_every_tensor_is_compared_all_the_same(tmp_path, monkeypatch):
    go(run("fp32", iters=2, checkpoint={"save": str(tmp_path)}))
    changed = functools.partial(run, "fp32", iters=3, checkpoint={"load": str(tmp_path)}, optimizer={"clip_grad": 0.5})
    assert go(changed()).losses.keys() == {3}
    build = checkpointer.Checkpointer.built
    monkeypatch.setattr(
        checkpointer.Checkpointer, "built", lambda self, training: (Wrong().built(training), build(self, training))
    )
    with pytest.raises(CheckpointError, match="tensors are not in the run as they were loaded"):
        go(changed())
