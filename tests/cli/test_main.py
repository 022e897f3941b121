"""Exit codes, error texts and the verbs' output."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import mpbridge
from mpbridge.cli import main as cli
from mpbridge.cli import text
from mpbridge.cli.main import main
from mpbridge.common.errors import Refused
from mpbridge.common.machines import machine
from mpbridge.common.tables import count
from mpbridge.common.upstream import UPSTREAM
from mpbridge.planning.capability import ASSUMED
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.recipes import BUILT_IN
from tests.te_cpu.wheels import FOLDERS, release_or_skip

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def said(capsys):
    def call(*arguments):
        code = main(list(arguments))
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def test_every_verb_has_what_the_entry_asks_for():
    assert {"list", "show", "compare", "plan", "train"} <= set(cli.verbs())
    for verb in map(cli.verb_of, cli.verbs()):
        assert verb.SUMMARY
        assert verb.ARGUMENTS
        assert callable(verb.run)


ANSWERS = [
    ([], 2, "usage: mpbridge"),
    (["estimate", "parallel.pipeline_model_parallel_size=3"], 2, "no rates"),
    (["--version"], 0, "mpbridge 0"),
    (["help", "memory"], 0, "--stages"),
    (["help", "memory", "more"], 2, "expected one command"),
    (["show", "fp8_ds", "--layers", "1000000000000"], 2, "at most 10000"),
    (["show", "fp8_ds", "--layers", "1e1"], 0, "of 10 in"),
    (["diff", "bf16_mixed"], 2, "required: B"),
    (["plan", "--config", "README.md"], 2, "README.md"),
    (["check", "--config", ""], 2, "--config '': an empty argument"),
    (["memory", "--world-size", "8e0"], 0, "on 8 GPUs"),
    (["plan", "--recipe", "nope.py:f"], 2, "no such file"),
    (["plan", "--on-conflict", "error", "model.fp8=e4m3"], 1, "mixed_precision.fp8=e4m3"),
    (["memory", "parallel.pipeline_model_parallel_size=3"], 1, "layers cannot be divided among 3"),
    (["memory", "--rank", "1", "parallel.pipeline_model_parallel_size=3"], 1, "layers cannot be divided among 3"),
    (["estimate", "--target", "h100", "parallel.pipeline_model_parallel_size=3"], 1, "layers cannot be divided among 3"),
    (["simulate", "parallel.pipeline_model_parallel_size=3"], 1, "layers cannot be divided among 3"),
    (["simulate", "parallel.tensor_model_parallel_size=3"], 1, "num_attention_heads 4 by tensor 3"),
    (["plan", "--on-conflict", "error", "ddp.grad_reduce_in_fp32=false"], 1, "to keep it"),
    (["plan", "ddp.grad_reduce_in_fp32=false"], 0, "mixed_precision.grad_reduce_in_fp32=false"),
    (["train", "--on-conflict", "error", "ddp.grad_reduce_in_fp32=false"], 1, "the recipe overrides"),
    (["recommend", "--recipe", "nope"], 2, "nope"),
    (["recommend", "--config", "deepseek_v3_671b", "--target", "a100", "--json"], 1, "{"),
    (["recommend", "--config", "gpt_tiny", "--target", "h100"], 0, "the configuration cannot be used: mixed_precision"),
    (["memory", "--config", "gpt_tiny", "--recipe", "bf16_mixed"], 0, "4.36e6 parameters on 1 GPU\n"),
    (["precision", "nope"], 2, "nope: No such file"),
    (["precision", "nope", "--top", "0"], 2, "--top 0: expected at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "words"), ANSWERS, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_exit_codes_and_words(said, arguments, code, words):
    got, out, err = said(*arguments)
    assert got == code, out + err
    assert words in out + err
    assert "Traceback" not in err


def test_several_faults_are_said_at_once(said):
    _, _, err = said("train", "model.hiden=3", "train.train_iters=null", "--recipe", "fp31")
    assert err.count("\n  - ") == 3


def test_options_and_settings_may_stand_in_any_order(said):
    code, out, _ = said("plan", "optimizer.lr=1e-4", "--recipe", "fp16", "ddp.bucket_size=7", "--json", "train.seed=5")
    assert code == 0
    data = json.loads(out)
    assert data["recipe"] == "fp16_mixed"
    given = {k for k, v in data["origin"].items() if v == "the command line"}
    assert {"optimizer.lr", "ddp.bucket_size", "train.seed"} <= given


def test_list_shows_every_recipe_and_its_json_reads_back(said):
    _, out, _ = said("list")
    assert [line.split()[0] for line in out.splitlines()[1:]][: len(BUILT_IN)] == [entry.name for entry in BUILT_IN]
    _, out, _ = said("list", "--json")
    assert {entry["name"] for entry in json.loads(out)["recipes"]} >= {entry.name for entry in BUILT_IN}
    assert "fp8_cs" in said("list", "--aliases")[1]


@pytest.mark.parametrize("name", [entry.name for entry in BUILT_IN])
def test_show_tells_every_recipe_and_its_json_is_the_policy(said, name):
    code, out, _ = said("show", name, "--layers", "24")
    assert code == 0
    assert "what it means" in out
    data = json.loads(said("show", name, "--json")[1])
    assert PrecisionPolicy.from_data(data["policy"]).fingerprint() == data["fingerprint"]


def test_plan_tells_what_becomes_of_a_mamba_layers_parameters(said):
    _, out, _ = said("plan", "--config", "nemotron_h_tiny", 'mixed_precision.keep_fp32=["*.A_log"]')
    rows = dict(line.split("  ", 1) for line in out.splitlines() if "  " in line)
    assert rows["Mamba's A_log"].strip() == "fp32"
    assert rows["Mamba's D"].strip() == "bf16, cast from the fp32 that it is made in"
    _, out, _ = said("plan", "--config", "nemotron_h_tiny", "mixed_precision=fp32")
    assert [line.split()[-1] for line in out.splitlines() if "Mamba's D" in line] == ["fp32"]
    assert "Mamba" not in said("plan", "--config", "gpt_tiny")[1]


MINE = "from mpbridge import get_mixed_precision_config\ndef mine():\n    return get_mixed_precision_config('{}')\n"


def test_show_reads_files_and_functions(said, tmp_path):
    (tmp_path / "mine.py").write_text(MINE.format("fp16"))
    assert "fp16" in said("show", f"{tmp_path / 'mine.py'}:mine")[1]
    assert "grad_reduce_in_fp32  false" in said("show", "configs/recipes/bf16_grads.yaml")[1]


def test_diff_is_compare_which_shows_fields_and_meaning(said, tmp_path):
    code, out, err = said("diff", "bf16_mixed", "configs/recipes/bf16_grads.yaml")
    assert (code, err) == (0, "mpbridge diff is now mpbridge compare\n")
    assert said("compare", "bf16_mixed", "configs/recipes/bf16_grads.yaml")[1] == out
    assert "grad_reduce_in_fp32  true" in out
    assert "gradients on the wire" in out
    assert "have the same fields" in said("diff", "bf16", "bf16_mixed")[1]
    data = json.loads(said("diff", "bf16_mixed", "fp16_mixed", "--json")[1])
    assert data["fields"]["params_dtype"] == ["bf16", "fp16"]
    (tmp_path / "mine.py").write_text(MINE.format("bf16"))
    for words in (["diff"], ["compare", "--execute"]):  # a function, as diff always ran it
        assert "have the same fields" in said(*words, "bf16", f"{tmp_path}/mine.py:mine")[1]


def test_plan_explains_where_values_came_from(said):
    _, out, _ = said("plan", "--recipe", "fp8_cs", "--explain", "optimizer.lr=5e-4")
    assert "layers of 4 in bf16" in out
    line = next(line for line in out.splitlines() if line.startswith("optimizer.lr "))
    assert line.split(maxsplit=2)[1:] == ["0.0005", "the command line"]
    rules = ("mixed_precision.modules.mlp.linear_fc1=bf16", "mixed_precision.modules.mlp.linear_fc2={fp8: hybrid}")
    origin = json.loads(said("plan", "--explain", *rules, "--json")[1])["values"]
    assert {name: value for name, value in origin.items() if "modules" in name} == {
        "mixed_precision.modules.mlp.linear_fc1": "bf16",
        "mixed_precision.modules.mlp.linear_fc2.fp8": "hybrid",
    }


def test_what_a_recipe_brings_along_is_said(said):
    small = ("plan", "--recipe", "configs/recipes/bf16_small_states.yaml", "--explain")
    assert "the recipe also sets ddp.use_distributed_optimizer=true" in said(*small)[1]
    assert "the recipe also sets" not in said(*small, "ddp.use_distributed_optimizer=true")[1]
    assert "the recipe also sets" not in said("plan")[1]


def test_plan_starts_from_as_few_processes_as_the_sizes_allow(said):
    assert json.loads(said("plan", "--config", "llama3_8b", "--json")[1])["world_size"] == 2
    assert json.loads(said("plan", "--config", "deepseek_v3_671b", "--json")[1])["world_size"] == 512
    assert json.loads(said("plan", "--config", "llama3_8b", "--world-size", "8", "--json")[1])["world_size"] == 8


def test_tables_are_richs_on_a_terminal_and_aligned_elsewhere(monkeypatch, capsys):
    text.print_table(("a", "b", "c"), [("1", "", "x"), ("22", "", "[y]")])
    assert capsys.readouterr().out == "a   c\n1   x\n22  [y]\n"
    monkeypatch.setattr(text, "on_terminal", lambda: True)
    text.print_table(("a", "b"), [("1", "[y]")], title="t")
    assert "[y]" in capsys.readouterr().out


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_names_stay_whole_on_every_terminal(monkeypatch, capsys, width):
    monkeypatch.setattr(text, "on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for entry in BUILT_IN:
        assert any(line.split()[:1] == [entry.name] for line in lines)


def test_train_takes_the_world_from_torchrun_and_hands_over_the_run(monkeypatch, said):
    import types

    runs = []

    def pretrain(run):
        runs.append(run)
        return types.SimpleNamespace(stopped=None, iterations=3, applied=3)

    monkeypatch.setitem(sys.modules, "mpbridge.training.loop", types.SimpleNamespace(pretrain=pretrain))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert said("train", "--recipe", "fp16", "--emulate", "--audit", "warn", "train.train_iters=3")[0] == 0
    (run,) = runs
    assert (run.world_size, run.recipe, run.emulate) == (2, "fp16_mixed", True)
    assert (run.train["audit"], run.train["micro_batch_size"]) == ("warn", 4)
    assert run.facts.machine is not None
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert said("train")[0] == 2


def test_refusals_exit_with_one_and_other_ranks_say_one_line(monkeypatch, said):
    def no(arguments):
        raise Refused("no\nbecause")

    monkeypatch.setattr(cli, "_dispatch", no)
    assert said("x") == (1, "", "no\nbecause\n")
    monkeypatch.setenv("RANK", "1")
    assert said("x") == (1, "", "rank 1: no\n")


def test_an_interrupt_is_no_traceback(monkeypatch, said):
    def stop(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_dispatch", stop)
    assert said("x") == (130, "", "interrupted\n")


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{shlex.quote(sys.executable)} -m mpbridge list --json | head -c 10"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""


def test_the_script_and_the_module_are_the_command():
    for start in (["scripts/pretrain.py"], ["-m", "mpbridge", "train"]):
        command = [sys.executable, *start, "train.train_iters=null"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert "train.train_iters is missing" in done.stderr


@pytest.mark.parametrize(("verb", "heard"), [("train", ["yours"]), ("on-cpu", [*UPSTREAM, "yours"])])
def test_only_megatron_cores_warnings_about_itself_are_silent(monkeypatch, said, verb, heard):
    def warn(args):
        for words in (*UPSTREAM, "yours"):
            warnings.warn(f"{words}: so it is", UserWarning, stacklevel=1)
        return 0

    monkeypatch.setattr(cli.verb_of(verb), "run", warn)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert said(verb, "a.b=1")[0] == 0
    assert [str(one.message).partition(":")[0] for one in seen] == heard


def test_so_they_are_in_a_script_that_trains_from_python():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.warn(f"{UPSTREAM[0]}: a script of another kind", UserWarning, stacklevel=1)
        assert mpbridge.pretrain
        for words in (*UPSTREAM, "yours"):
            warnings.warn(f"{words}: so it is", UserWarning, stacklevel=1)
    here = [str(one.message).partition(": ")[2] for one in seen if one.filename == __file__]  # torch has its own
    assert here == ["a script of another kind", "so it is"]


def test_an_answer_that_nobody_read_is_no_success():
    """A reader that is gone before the first line: what the verb would have answered is not known."""
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as gone:
        done = subprocess.run([sys.executable, "-u", "-m", "mpbridge", "list"], stdout=gone, stderr=subprocess.PIPE, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (141, b"")


def test_parameters_of_small_models_are_no_zeros():
    assert [count(number) for number in (82_112, 8_030_261_248)] == ["82,112", "8.03e9"]


def test_doctor_lists_the_machines_that_a_target_may_name(said):
    code, out, _ = said("doctor", "--machines")
    names = [line.split()[0] for line in out.splitlines()[1:]]
    assert code == 0
    assert {"h100", "b200", "rtx4090"} <= set(names)
    assert "cpu" not in names
    assert all(said("doctor", "--target", name, "--recipe", "bf16_mixed", "--json")[1] for name in names[:3])
    assert set(names) <= set(json.loads(said("doctor", "--machines", "--json")[1])["machines"])


def test_help_shows_a_users_day_and_on_request_every_verb_with_its_summary(said):
    _, first, _ = said("--help")
    assert [line.split()[0] for line in first.splitlines() if line.startswith("  ")] == list(cli.DAY)
    assert len(cli.DAY) == 8
    assert "more: mpbridge help --all" in first
    code, out, _ = said("help", "--all")
    assert code == 0
    for verb in cli.verbs():
        line = next(line for line in out.splitlines() if line.startswith(f"  {verb} "))
        assert len(line.split()) > 3


def test_plan_with_emulation_writes_the_high_precision_spelling(said):
    found = json.loads(said("plan", "--recipe", "fp8_cs", "--emulate", "--json")[1])["writes"]
    writes = {f"{w['target']}.{w['field']}" for w in found}
    assert "model.fp8" not in writes
    assert "model.bf16" in writes


def test_output_is_utf8_safe_on_a_plain_pipe(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["list"]) == 0
    out.getvalue().encode("ascii")


def test_a_missing_module_is_named_with_who_imports_it(said, tmp_path, monkeypatch):
    (tmp_path / "strangers_package.py").write_text("import no_such_dependency\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("mpbridge.cli.list.run", lambda args: __import__("strangers_package"))
    code, _, text = said("list")
    assert code == 1
    where = f"strangers_package ({tmp_path / 'strangers_package.py'}, line 1)"
    assert f"{where} imports no_such_dependency" in " ".join(text.split())


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"optimizer": "muon", "muon_fp32_matmul_prec": "highest"}, {"hidden matrices by muon": "exp_avg fp32; everything else by Adam", "Newton-Schulz multiplies in": "FP32"}),
        ({"optimizer": "muon", "muon_fp32_matmul_prec": "low"}, {"Newton-Schulz multiplies in": "FP32: torch knows no low"}),
        ({"optimizer": "soap"}, {"hidden matrices by soap": "exp_avg fp32, exp_avg_sq fp32, factors fp32; everything else by Adam"}),
    ],
    ids=["muon", "low", "soap"],
)  # fmt: skip
def test_a_plan_says_who_trains_hidden_matrices_and_in_what(settings, rows, said):
    plan = ("plan", "--recipe", "bf16_mixed", "--json")
    given = (f"optimizer.{name}={value}" for name, value in settings.items())
    assert rows.items() <= json.loads(said(*plan, *given)[1])["meaning"].items()
    assert not rows.keys() & json.loads(said(*plan)[1])["meaning"].keys()


def test_a_plan_says_how_much_is_frozen_and_who_trains(said):
    """By hand: rank 8 beside each of four layers' linears, 256 -> 768, 256 -> 256, 256 -> 2 x 1024 and 1024 -> 256."""
    adapters = 4 * 8 * (256 + 768 + 256 + 256 + 256 + 2048 + 1024 + 256)
    meaning = json.loads(said("plan", "--config", "lora_tiny", "--json")[1])["meaning"]
    assert meaning["frozen"].endswith("parameters (*)")
    assert meaning["trained"] == f"{adapters:,} parameters, {adapters:,} of them in adapters of rank 8, in fp32"


@pytest.mark.parametrize(("engine", "needs"), [("mcore", True), ("fsdp2", False)])
def test_check_says_that_an_optimizers_package_is_not_here(engine, needs, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "emerging_optimizers", None)
    muon = ("--recipe", "fp32_params_bf16_compute", f"engine={engine}", "optimizer.optimizer=muon")
    notes = json.loads(said("check", "--config", "gpt_tiny", "--json", *muon)[1])["notes"]
    lacks = [note for note in notes if note.startswith("to train: optimizer.optimizer=muon")]
    assert any("Emerging-Optimizers" in note for note in lacks) is needs


def test_check_names_what_the_recipe_overrides(said):
    code, out, _ = said("check", "--recipe", "bf16_mixed", "--target", "h100", "--json", "model.fp8=hybrid")
    assert code == 0
    notes = json.loads(out)["notes"]
    assert [note for note in notes if note.startswith("overridden: model.fp8: was hybrid, becomes none")]


def test_check_weighs_layouts_with_fewer_ranks_than_optimizer_instances(said):
    sharded = ["ddp.use_distributed_optimizer=true", "ddp.num_distributed_optimizer_instances=2"]
    code, out, _ = said("check", "--recipe", "bf16_mixed", "--target", "h100", "--world-size", "2", *sharded)
    assert (code, "valid  yes" in out) == (0, True)


@pytest.mark.parametrize(("target", "cannot"), [("h100", True), ("b200", False)])
def test_check_judges_the_machine_that_a_run_plays(said, monkeypatch, target, cannot):
    for module in ("cli._target", "settings.draft"):
        monkeypatch.setattr(f"mpbridge.{module}.played", lambda target, te: (machine(target or "h100"), ASSUMED))
    run = ("--config", "gpt_tiny", "--recipe", "bf16_with_nvfp4_mixed", "emulate=te", f"target={target}")
    assert ("machine-cannot-run-it" in said("check", "--json", *run)[1]) is cannot


def test_memory_of_a_played_machine_is_beside_bf16s(monkeypatch, said):
    release_or_skip("2.11")
    monkeypatch.setenv("MPBRIDGE_TE_PATH", os.pathsep.join(map(str, FOLDERS)))
    played = ["--emulate", "te", "--target", "b200", "--recipe", "bf16_with_fp8_current_scaling_mixed"]
    code, _, err = said("memory", "--config", "gpt_tiny", *played)
    assert code in (0, 1), err
