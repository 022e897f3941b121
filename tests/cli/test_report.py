"""`report` is one answer about a run: its parts say what `audit`, `diagnose` and `precision` say, and its exit code is theirs."""

from __future__ import annotations

import json

import pytest

from mpbridge.cli.main import main

STEPS = [{"iteration": n, "loss": 6.0 - 0.1 * n, "grad_norm": 1.0, "loss_scale": 1.0, "lr": 1e-3} for n in range(1, 13)]
GOOD = {"recipe": "bf16_mixed", "step": 1, "stage": "live", "ok": True, "reason": "", "facts": {"weights moved": ["yes", "yes", "ok"]}, "faults": []}  # fmt: skip
BAD = GOOD | {"step": 9, "ok": False, "faults": ["params: promised bf16, found fp32"]}
NAN = [*STEPS[:8], *({**row, "loss": "nan", "grad_norm": "nan"} for row in STEPS[8:])]
RUNS = {
    "healthy": (STEPS, [GOOD], True), "a fact that is not as promised": (STEPS, [GOOD, BAD], False),
    "not finite": (NAN, [GOOD], False), "no audit": (STEPS, [], True),
    "unproved": (STEPS, [GOOD | {"facts": {}}], True),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    def make(steps, audits):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        config = {"train": {"train_iters": 20}, "checkpoint": {"save": str(tmp_path)}}
        data = {"recipe": "bf16_mixed", "config": config, "audit": {"history": audits}}
        (tmp_path / "precision.json").write_text(json.dumps(data))
        return tmp_path

    return make


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_its_parts_are_what_the_verbs_of_each_part_say(folder, capsys, cli, run):
    steps, audits, good = run
    place = str(folder(steps, audits))
    printed = cli("report", place, "--json", code=0 if good else 1)
    answer = json.loads(printed, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert (answer["ok"], answer["steps"], answer["of"]) == (good, 12, 20)
    code = main(["diagnose", place, "--json"])
    diagnosed = json.loads(capsys.readouterr().out)
    assert answer["diagnosis"] | {"schema_version": diagnosed["schema_version"]} == diagnosed
    assert answer["ok"] == (code == 0 and not any(not one["ok"] for one in audits))
    if audits:
        proved = all(one["ok"] and one["facts"] for one in audits)
        judged = json.loads(cli("audit", place, "--json", code=0 if proved else 1))
        assert (answer["audits"]["ok"] is True, answer["audits"]["audits"]) == (judged["ok"], len(judged["audits"]))
    text = cli("report", place, code=0 if good else 1)
    for line in ("12 of 20 steps", "curves     loss 5.9 -> ", "audits     ", "precision  nothing was measured", "resume     no: "):  # fmt: skip
        assert line in text, text
    assert f"verdict    {answer['verdict']}\n" in text
    assert ("see audits" in text) == any(not one["ok"] for one in audits)
    assert ("as promised, nothing is out of line" in text) == (run == RUNS["healthy"])


def test_a_run_that_took_no_step_says_what_there_is(folder, cli):
    place = str(folder([], [GOOD | {"stage": "static", "step": 0}]))
    text = cli("report", place)
    assert "bf16_mixed, 0 of 20 steps" in text
    assert "curves     none" in text
    assert text.endswith("verdict    no step was taken, so there is nothing to judge\n")
    assert json.loads(cli("report", place, "--json"))["curves"] == {}
    assert "nothing to plot" in cli("plot", place, code=1, error=True)  # the call is right


@pytest.mark.parametrize(
    ("taken", "said"), [(12, "12 of 20 steps so far: as promised"), (20, "verdict    as promised")]
)
def test_a_verdict_on_a_part_of_a_run_says_so(folder, cli, taken, said):
    steps = [STEPS[min(step, len(STEPS)) - 1] | {"iteration": step} for step in range(1, taken + 1)]
    assert said in cli("report", folder(steps, [GOOD]))


@pytest.mark.slow
def test_a_real_run_resumes_from_what_it_names(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    small = ["model.num_layers=3", "model.hidden_size=64", "model.ffn_hidden_size=128", "data.seq_length=64"]
    files = ["logger.log_dir=run", "checkpoint.save=run", "checkpoint.save_interval=2"]
    words = ["train", "--recipe", "fp8_cs", "--emulate", "train.train_iters=4", "train.eval_iters=0", "logger.precision_every=2"]  # fmt: skip
    cli(*words, *small, *files)
    answer = json.loads(cli("report run --json"))
    assert answer["resume"] == {"from": "run/step_00000004", "step": 4, "why_not": None}
    assert answer["precision"]["worst"]["row_error"] > 0
    cli("report run --out page.html")
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_a_number_in_the_place_of_a_folder_is_no_folder(folder, cli):
    place = folder(STEPS, [GOOD])
    data = json.loads((place / "precision.json").read_text())
    data["config"]["checkpoint"]["save"] = 3
    (place / "precision.json").write_text(json.dumps(data))
    assert "resume" in cli("report", place)
