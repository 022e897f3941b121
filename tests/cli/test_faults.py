"""How the commands end when what they are given, or where they write to, is not what they expect: one line and an exit code."""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpbridge.cli.main import main
from mpbridge.precision import yaml_loader
from tests.forked import forked, python

ROOT = Path(__file__).resolve().parents[2]


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command.replace("mpbridge", f"{shlex.quote(sys.executable)} -m mpbridge")], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)  # fmt: skip


@pytest.mark.parametrize(
    ("redirection", "code", "said"), [(">&-", 2, "standard output is closed"), (">/dev/full", 1, "No space left")]
)
def test_an_output_that_takes_nothing_is_one_line_and_not_success(redirection: str, code: int, said: str) -> None:
    done = shell(f"mpbridge list {redirection}")
    assert done.returncode == code
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_recipes_file_is_read_once_however_much_is_asked_of_it(file, capsys: pytest.CaptureFixture[str]) -> None:
    place = file("odd.yaml", "model: {" + ", ".join(f"a{i}: {i}" for i in range(300)) + "}")
    before = yaml_loader._loaded.cache_info().misses
    assert main(["show", str(place)]) == 2
    assert yaml_loader._loaded.cache_info().misses == before + 1


DEVICE = "/dev/zero"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("dup.json", "{" + ",".join(['"bf16":{"enabled":true}'] * 100_000) + "}", "characters, expected at most"),
        ("merge.yaml", f"<<: [{','.join(['{a: 1}'] * 100_000)}]\n", "more than 20,000 keys and values"),
    ],
    ids=["a key 100,000 times", "100,000 merges"],
)
def test_a_file_of_another_stack_is_read_in_bounded_time(name: str, text: str, said: str, tmp_path: Path, cli) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    began = time.process_time()
    assert said in cli("import", tmp_path / name, code=2)
    assert time.process_time() - began < 15  # 1 on an idle machine; 80 before there was a limit


def test_a_script_of_unknown_options_does_not_flood_the_terminal(file, cli) -> None:
    script = file("run.sh", "torchrun pretrain_gpt.py --bf16 " + " ".join(f"--x{i}" for i in range(2_000)))
    assert "and 1,900 more: --json has all of them" in cli("import", script, code=1)
    assert '"--x1999' in cli("import", script, "--json", code=1)


RECIPE, CONFIGURATION = ["show", "odd.yaml"], ["check", "--config", "odd.yaml"]


# one function reads both: each kind of text once, and one of them as both
@pytest.mark.parametrize(
    ("text", "arguments"),
    [("k: 1\n" * 4_000_000, RECIPE), ("- " * 40_000, CONFIGURATION), ("[" * 90_000, RECIPE), (None, RECIPE), (None, CONFIGURATION)],
    ids=["20 MB", "dashes", "brackets", "an endless recipe", "an endless configuration"],
)  # fmt: skip
def test_a_file_that_is_no_configuration_costs_little_memory(
    text: str | None, arguments: list[str], tmp_path: Path
) -> None:
    place = tmp_path / "odd.yaml"
    place.symlink_to(DEVICE) if text is None else place.write_text(text, encoding="utf-8")
    code = f"import re, time\nfrom mpbridge.cli.main import main\nbegan = time.process_time()\ncode = main({arguments!r})\nprint(code, re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1], time.process_time() - began)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True, timeout=120)  # fmt: skip
    code, kilobytes, seconds = done.stdout.split()
    assert code == "2", done.stderr
    assert int(kilobytes) < 100_000
    assert float(seconds) < 4  # 1 on an idle machine
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (["check", "--json", "--jsn"], "BadValue", "unrecognized arguments"),
        (["check", "--json", "--config", "nope"], "UnknownName", "nope"),
        (["memory", "--json", "--world-size", "1.5"], "BadValue", "not an integer"),
    ],
)
def test_an_error_for_a_program_is_one_line_of_json(arguments: list[str], kind: str, said: str, cli) -> None:
    err = cli(*arguments, code=2)
    assert len(err.splitlines()) == 1
    data = json.loads(err)
    assert (data["error"], data["exit_code"]) == (kind, 2)
    assert said in data["message"]


def test_every_fault_of_a_configuration_is_an_entry_for_a_program(cli) -> None:
    data = json.loads(cli("plan --json model.hiden_size=3 optimizer.lr=x", code=2))
    assert [fault.partition("=")[0] for fault in data["faults"]] == ["model.hiden_size", "optimizer.lr"]


def test_a_rehearsal_finds_no_room_before_it_trains(tmp_path: Path, cli) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    # a configuration that is missing would be found only afterwards
    assert f"--out {tmp_path / 'file'}" in cli("rehearse --config nope --out", tmp_path / "file", code=2)


def test_the_table_and_the_verdict_speak_one_unit(cli) -> None:
    out = cli("memory --config llama3_8b --target h100", code=1)
    assert "MiB" not in out
    needed = next(line.split()[4] for line in out.splitlines() if line.startswith("needed of the device"))
    assert f"{needed} +-" in next(line for line in out.splitlines() if "does not fit on" in line)


def test_check_says_what_the_first_loss_scale_may_cost(cli) -> None:
    printed = cli("check --recipe fp16_mixed train.train_iters=12")
    said = next(line for line in printed.splitlines() if line.startswith("scale"))
    assert "at most 33" in said
    assert "this run has 12 steps" in said
    assert "scale" not in cli("check --recipe bf16_mixed")


def test_a_section_with_thousands_of_settings_is_refused_quickly(file, cli) -> None:
    place = file("wide.yaml", "model:\n" + "".join(f"  k{n}: 1\n" for n in range(9000)))
    began = time.process_time()
    said = cli("check --config", place, code=2)
    assert time.process_time() - began < 5  # 1 on an idle machine
    assert "8,992 further unknown settings" in said
    assert len(said.splitlines()) < 20
    place.write_text("".join(f"k{n}: 1\n" for n in range(9000)), encoding="utf-8")
    assert "8,992 further unknown sections" in cli("check --config", place, code=2)


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "--config", "{}"],
        ["show", "{}"],
        ["train", "--config", "hf:{folder}"],
        ["check", "data.tokenizer={folder}"],
        ["init", "new", "--config", "{}"],
        ["check", "--machine-file", "{}"],
        ["plot", "{}"],
        ["audit", "{}"],
    ],
    ids=" ".join,
)
def test_a_fifo_is_not_waited_for(arguments: list[str], tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.model"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "odd.yaml").symlink_to("config.json")
    done = python(["-m", "mpbridge", *(word.format("odd.yaml", folder=".") for word in arguments)], cwd=tmp_path, timeout=60)  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("text", ["a: [1\nb: 2\n", "a: 1\n a: 2\n", "\tx: 1", "a: *b", "a: !!python/object:x {}"])
def test_yaml_that_cannot_be_read_is_one_line(text: str, file, cli) -> None:
    place = file("bad.yaml", text)
    for arguments in (["check", "--config", str(place)], ["show", str(place)], ["check", "--recipe", str(place)]):
        said = cli(*arguments, code=2).splitlines()
        assert len([line for line in said if "line " in line]) == 1, said
        assert len(said) <= 2


def test_json_may_stand_before_the_verb(cli) -> None:
    assert "no command named 'nope'" in json.loads(cli("--json nope", code=2))["message"]
    assert json.loads(cli("--json list"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("verb", ["diagnose", "precision"])
def test_a_page_without_room_is_named_and_costs_the_page_only(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"iteration": step, "loss": 3.0, "grad_norm": 1.0, "lr": 1e-3} for step in range(1, 20)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main([verb, str(tmp_path), "--out", "/dev/full"]) == 1
    out, err = capsys.readouterr()
    assert {"diagnose": "nothing is out of line", "precision": "no precision.json"}[verb] in out
    assert err == "--out /dev/full cannot be written: No space left on device\n"


def without_room(arguments: list[str], limit: int, folder: Path) -> None:
    """A limit on the size of files stands for the disk: the same writes fail, with EFBIG in place of ENOSPC."""
    ours, theirs = os.pipe()  # what is said is no file
    if pid := os.fork():
        os.close(theirs)
        with open(ours) as stream:
            said = stream.read()
        _, status = os.waitpid(pid, 0)
        print(said)
        os._exit(os.waitstatus_to_exitcode(status))
    os.dup2(theirs, 1)
    os.dup2(theirs, 2)
    os.chdir(folder)
    sys.dont_write_bytecode = True  # no half of a compiled module stays behind
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    code = 70
    try:
        code = main(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [(["init", "new"], 100), (["init", "new"], 900), (["import", "--args", "--bf16", "--write", "r.yaml"], 10), (["report", "run", "--out", "p.html"], 100), (["report", "run", "--out", "old.html"], 100),
     (["data", "prepare", "long.txt", "--cache", "new/cache"], 20_000), (["convert", "hf:hf", "ckpt:new/in"], 20_000)],
    ids=str,
)  # fmt: skip
def test_a_full_disk_is_no_misuse_and_leaves_nothing(arguments: list[str], limit: int, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"iteration": 1, "loss": 3.0}\n')
    (tmp_path / "old.html").write_text("kept")
    (tmp_path / "long.txt").write_text("word " * 20_000)
    if arguments[0] == "convert":
        from tests.training.serving.folders import LLAMA, llama_tensors, write

        write(tmp_path / "hf", LLAMA, llama_tensors())
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    with forked(without_room, arguments, limit, tmp_path) as process:
        assert process.wait() == 1, process.text
    assert "File too large" in process.text
    assert "Traceback" not in process.text
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    assert (tmp_path / "old.html").read_text() == "kept"


@pytest.mark.parametrize("arguments", [["init", "file"], ["init", "file/in"], ["data", "prepare", "file", "--out", "file/in/x"], ["data", "prepare", "file", "--cache", "file"]], ids=" ".join)  # fmt: skip
def test_a_file_in_the_place_of_a_folder_is_named(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("text")
    assert "file is a file, expected a folder" in cli(*arguments, code=2)


def test_no_layout_is_looked_for_on_a_machine_that_cannot_run_the_recipe(cli) -> None:
    began = time.process_time()
    printed = cli("memory --config qwen3_30b_a3b --recipe bf16_with_nvfp4_mixed --target a10 --world-size 64", code=1)  # fmt: skip
    assert "no layout was searched: " in printed
    assert time.process_time() - began < 5, "thousands of layouts were judged"


def test_the_nearest_layout_is_named_where_the_machine_runs_the_recipe(cli) -> None:
    printed = cli("memory --config llama3_70b --recipe bf16_mixed --target a100 --world-size 64 parallel.tensor_model_parallel_size=1 parallel.pipeline_model_parallel_size=1 parallel.virtual_pipeline_model_parallel_size=null parallel.sequence_parallel=false", code=1)  # fmt: skip
    assert "nearest layout that fits, on 64 GPUs: " in printed
