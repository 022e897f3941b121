"""The built wheel, installed away from the checkout: its configurations come along, its commands find them, and a run trains. No network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def quiet(*command: str | Path, cwd: Path, code: int = 0, **more: str) -> str:
    """What the command printed, and on stderr where `code` is not 0; nothing of the checkout is in its way."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=840, check=False)  # fmt: skip
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + (done.stderr if code else "")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"  # setuptools leaves a build folder beside what it builds
    for name in ("mpbridge", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    quiet(*PIP, "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation", "-w", place, source, cwd=place)
    (found,) = place.glob("mpbridge_precision-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The bin folder of an environment that has the wheel, and sees the other packages of the one that runs the tests."""
    place = wheel.parent / "venv"
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    site = Path(quiet(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).strip())
    (site / "others.pth").write_text("\n".join({sysconfig.get_path(kind) for kind in ("purelib", "platlib")}) + "\n")
    quiet(*PIP, "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=place)
    return place / "bin"


def test_every_configuration_is_in_the_wheel_as_it_is_in_the_checkout(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        found = {name: archive.read(name) for name in archive.namelist() if name.startswith("mpbridge/configs/")}
        names = archive.namelist()
    wanted = {f"mpbridge/{path.relative_to(ROOT)}": path.read_bytes() for path in (ROOT / "configs").rglob("*.yaml")}
    assert found == wanted
    assert "mpbridge/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "scripts/", "configs/"))]


COMMANDS = [
    ["--version"],
    ["list"],
    ["show", "fp8_mlp_only"],
    ["diff", "bf16_mixed", "configs/recipes/bf16_grads.yaml"],
    ["plan", "--recipe", "bf16_mixed", "--config", "configs/gpt_tiny.yaml", "ddp.grad_reduce_in_fp32=false"],
    ["plan", "--recipe", "fp8-mlp-only"],
    ["check", "--recipe", "fp8_cs", "--config", "llama3_8b", "--target", "h100", "--world-size", "8"],
    ["memory", "--config", "moe_tiny"],
    ["estimate", "--config", "llama3_70b", "--world-size", "64", "--target", "h100"],
    ["export", "bf16_mixed", "--to", "megatron-lm"],
    ["words", "bf16"],
    ["doctor"],
    ["help", "data"],
    ["recommend", "--config", "gpt_tiny", "--target", "h100", "--world-size", "2"],
    ["layouts", "--config", "gpt_tiny", "--target", "h100", "--world-size", "2"],
    ["launch", "--nodes", "2", "--gpus-per-node", "8", "--", "train", "--recipe", "bf16_mixed", "--config", "gpt_tiny", "checkpoint.save=run", "train.global_batch_size=64"],
    ["compare", "bf16_mixed", "fp8_cs"],
    ["diagnose", "run", "--out", "page.html"],
    ["init", "first", "--recipe", "fp8_mlp_only"],
    ["check", "--config", "first/config.yaml", "--target", "h100"],
]  # fmt: skip


def test_light_commands_of_an_installed_wheel_need_no_checkout(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    steps = [{"iteration": step, "loss": 6 - step / 10, "grad_norm": 1.0, "lr": 1e-3} for step in range(1, 7)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    code = f"""
import contextlib, io, json
import mpbridge
from mpbridge.cli.main import main
codes = []
for words in {COMMANDS!r}:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        codes.append([words, main(words), out.getvalue()[-2000:]])
print(json.dumps([mpbridge.__file__, codes]))
"""
    home, codes = json.loads(quiet(installed / "python", "-c", code, cwd=tmp_path))
    assert Path(home).is_relative_to(installed.parent)
    assert [(words, said) for words, code, said in codes if code != 0] == []
    assert "uPlot=function" in (tmp_path / "page.html").read_text(
        encoding="utf-8"
    )  # templates and scripts are in the wheel


def test_the_installed_command_says_its_version(installed: Path, tmp_path: Path) -> None:
    assert quiet(installed / "mpbridge", "--version", cwd=tmp_path).startswith("mpbridge 0.")


@pytest.mark.slow
def test_a_starter_folder_trains_from_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    quiet(installed / "mpbridge", "init", "first", cwd=tmp_path)
    tiny = ["train.train_iters=2", "train.eval_iters=0", "model.num_layers=1", "model.hidden_size=64", "model.ffn_hidden_size=128", "data.seq_length=32"]  # fmt: skip
    start = [installed / "python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "mpbridge", "train"]  # fmt: skip
    out = quiet(*start, "--config", "config.yaml", *tiny, cwd=tmp_path / "first", OMP_NUM_THREADS="1")
    assert "live audit" in out
    assert (tmp_path / "first/run/checkpoints").is_dir()
    out = quiet(installed / "python", "train.py", *tiny, "train.train_iters=3", cwd=tmp_path / "first", OMP_NUM_THREADS="1")  # fmt: skip
    assert "resumed from run/checkpoints" in out


HF_RUN = ["--config", "hf:llama", "data.corpus=packed_text_document", "data.seq_length=32", "train.global_batch_size=2", "train.micro_batch_size=2", "optimizer.lr=1e-3"]  # fmt: skip
HEAVY: list[tuple[list[str], list[str]]] = [
    (["data", "prepare", "notes.txt", "books.jsonl", "--out", "packed", "--cache", "cache"], ["100 documents", "skipped 1 record", "packed_text_document"]),
    (["data", "inspect", "packed_text_document"], ["documents", "uint16"]),
    (["data", "inspect", "--tokenizer", "byte"], ["end of text", "256"]),
    (["check", "--config", "hf:llama"], ["0 errors"]),
    (["convert", "hf:llama", "llama.yaml"], ["llama.yaml"]),
    (["convert", "hf:llama", "ckpt:begin"], ["begin/step_00000000", "21 tensors"]),
    (["convert", "ckpt:begin", "hf:back", "--like", "hf:llama"], ["begin/step_00000000 -> back: llama, 21 tensors"]),
    (["train", *HF_RUN, "--recipe", "fp8_mlp_only", "--emulate", "checkpoint.load=begin", "--reset-optimizer", "checkpoint.save=run", "logger.log_dir=run", "logger.precision_every=2", "train.train_iters=4"], ["resumed from begin/step_00000000: weights only", "step 4/4", "live audit"]),
    (["audit", "run"], ["as promised"]),
    (["precision", "run"], ["operands with the largest row errors", "page: run/precision.html"]),
    (["plot", "run", "--no-picture"], ["run: loss"]),
    (["diagnose", "run", "--out", "page.html"], ["page.html"]),
    (["resume-check", "run"], ["run/step_00000004"]),
    (["convert", "ckpt:run", "hf:result", "--like", "hf:llama"], ["run/step_00000004 -> result: llama"]),
    (["rehearse", *HF_RUN, "--recipes", "fp8_mlp_only", "--steps", "1", "--out", "rehearsal"], ["fp8_mlp_only: ", "report: rehearsal/index.html"]),
    (["simulate", "--config", "gpt_tiny", "--world-size", "2", "model.num_layers=1"], ["2 ranks"]),
    (["import", "job.sh"], ["megatron-lm", "bf16_with_fp8_current_scaling_mixed"]),
    (["import", "--args", "--bf16", "--write", "mine.yaml"], ["bf16_mixed"]),
    (["compare", "fp8_cs", "job.sh"], ["alike"]),
    (["export", "mine.yaml", "--to", "torchtitan"], ["torchtitan"]),
    (["init", "first", "--config", "hf:llama"], ["next: cd first"]),
    (["launch", "--nodes", "2", "--gpus-per-node", "8", "--", "train", "--config", "gpt_tiny", "checkpoint.save=runs/a", "train.global_batch_size=64"], ["#SBATCH --nodes=2"]),
]  # fmt: skip
"""A command of an installed wheel, in the order in which a user comes to them -> what it has to say."""


@pytest.fixture
def belongings(tmp_path: Path) -> Path:
    """What a user brings along: texts, a model, a launch script."""
    import torch

    pytest.importorskip("safetensors", reason="needs the extra hf")
    from tests.training.weights.folders import LLAMA, llama_tensors, write

    rows = {name: torch.randn(320, 64).bfloat16() * 0.05 for name in ("model.embed_tokens.weight", "lm_head.weight")}
    write(tmp_path / "llama", LLAMA | {"vocab_size": 320}, llama_tensors() | rows)
    (tmp_path / "notes.txt").write_text("What is written here is read byte by byte.\n" * 200)
    books = [json.dumps({"text": f"It was a dark and stormy night, number {night}. " * 10}) for night in range(99)]
    (tmp_path / "books.jsonl").write_text("\n".join([*books, "no JSON"]) + "\n")
    (tmp_path / "job.sh").write_text("torchrun pretrain_gpt.py --bf16 --fp8-format hybrid --fp8-recipe tensorwise\n")
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_verb_does_its_work_away_from_a_checkout(installed: Path, belongings: Path) -> None:
    from safetensors.torch import load_file

    for commands in together(HEAVY):
        asked = [words for words, _ in commands]
        for (words, wanted), (code, out) in zip(commands, in_one_process(installed, belongings, asked), strict=True):
            missing = [text for text in wanted if text not in out]
            assert (code, missing) == (0, []), f"mpbridge {' '.join(words)}:\n{out}"
    for made in ("llama.yaml", "mine.yaml", "page.html", "run/precision.html", "rehearsal/index.html", "first/train.py"):  # fmt: skip
        assert (belongings / made).stat().st_size > 0, made
    before, back, after = (load_file(belongings / name / "model.safetensors") for name in ("llama", "back", "result"))
    assert before.keys() == back.keys() == after.keys()
    assert all(before[name].equal(back[name]) for name in before)
    assert not any(before[name].equal(after[name]) for name in before if "proj" in name)


def together(commands: list[tuple[list[str], list[str]]]) -> list[list[tuple[list[str], list[str]]]]:
    """Commands that share a process, since what each costs is its imports; one that trains has its own."""
    groups: list[list[tuple[list[str], list[str]]]] = [[]]
    for command in commands:
        if command[0][0] in ("train", "rehearse", "simulate"):
            groups += [[command], []]
        else:
            groups[-1].append(command)
    return [group for group in groups if group]


def in_one_process(installed: Path, folder: Path, commands: list[list[str]]) -> list[tuple[int, str]]:
    """Exit code and output of each."""
    code = f"""
import contextlib, io, json
from mpbridge.cli.main import main
found = []
for words in {commands!r}:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        found.append((main(words), out.getvalue()))
print("FOUND" + json.dumps(found))
"""
    said = quiet(installed / "python", "-W", "ignore", "-c", code, cwd=folder, OMP_NUM_THREADS="1", COLUMNS="200", MPBRIDGE_TE_PATH="")  # fmt: skip
    return [(code, out) for code, out in json.loads(said.rpartition("FOUND")[2])]


@pytest.mark.slow
def test_verbs_of_extras_work_or_name_the_extra(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    steps = [{"iteration": step, "loss": 6 - step / 10, "grad_norm": 1.0, "lr": 1e-3} for step in range(1, 7)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (tmp_path / "mine.py").write_text("import transformer_engine\nprint('mine ran')\n")
    shtab, engine = find_spec("shtab"), find_spec("transformer_engine")
    commands = [["completion", shell] for shell in ("bash", "zsh", "fish")] + [["plot", "run", "--out", "curves.png"], ["on-cpu", "--target", "h100", "mine.py"]]  # fmt: skip
    *shells, plot, on_cpu = in_one_process(installed, tmp_path, commands)
    for code, out in shells:
        assert code == (0 if shtab else 2)
        assert ("gpt_tiny" if shtab else "pip install -e '.[completion]'") in out
    assert plot[0] == 0
    assert ("picture: curves.png" in plot[1]) == bool(find_spec("matplotlib"))
    assert on_cpu[0] == (0 if engine else 1)
    assert ("mine ran" if engine else "[te-cpu]") in on_cpu[1]
