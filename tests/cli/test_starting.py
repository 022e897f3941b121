"""What a user begins with: names that come along, a starter folder, shell completion."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mpbridge.cli.main import main
from mpbridge.precision.registry import describe, get_mixed_precision_config
from mpbridge.precision.yaml_loader import load_yaml
from mpbridge.settings.container import ConfigContainer

ROOT = Path(__file__).resolve().parents[2]


def test_a_configuration_and_a_recipe_are_found_by_name_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("gpt_tiny", "configs/gpt_tiny.yaml"):
        assert ConfigContainer.load(name) == ConfigContainer.load(ROOT / "configs/gpt_tiny.yaml")
    shipped = get_mixed_precision_config(str(ROOT / "configs/recipes/fp8_mlp_only.yaml"))
    for name in ("fp8_mlp_only", "fp8-mlp-only", "configs/recipes/fp8_mlp_only.yaml"):
        assert get_mixed_precision_config(name) == shipped
        assert json.loads(cli("show", name, "--json"))["config"] == shipped.as_data()


def test_a_file_of_the_users_goes_before_one_that_comes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs/recipes").mkdir(parents=True)
    (tmp_path / "configs/gpt_tiny.yaml").write_text("train: {train_iters: 7}\n", encoding="utf-8")
    (tmp_path / "configs/recipes/bf16_grads.yaml").write_text("extends: fp32\n", encoding="utf-8")
    assert ConfigContainer.load("gpt_tiny", ["mixed_precision=fp32"]).train.train_iters == 7
    assert get_mixed_precision_config("configs/recipes/bf16_grads.yaml") == get_mixed_precision_config("fp32")


def test_a_misspelled_recipe_file_is_told_with_the_nearest(cli) -> None:
    assert "nearest: fp8_mlp_only" in cli("show fp8_mlp_onyl", code=2)
    assert describe("fp8_mlp_only").name == "fp8_mlp_only"


def test_a_starter_folder_is_legal_as_it_stands_and_written_once(tmp_path: Path, cli) -> None:
    place = tmp_path / "first"
    cli("init", place, "--recipe", "fp8_cs", "--config", "moe_tiny")
    made = ConfigContainer.load(place / "config.yaml").resolved()
    shipped = ConfigContainer.load("moe_tiny", ["mixed_precision=fp8_cs"]).resolved()
    assert (made.policy, made.facts.shape) == (shipped.policy, shipped.facts.shape)
    assert made.checkpoint["save"] == made.checkpoint["load"] == "run/checkpoints"
    compile((place / "train.py").read_text(encoding="utf-8"), "train.py", "exec")
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    assert "already exist" in cli("init", place, code=2)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    cli("init", tmp_path / "other", "--recipe", "nope", code=2)
    assert not (tmp_path / "other").exists()


def test_a_starter_folder_freezes_what_its_configuration_freezes(tmp_path: Path, cli) -> None:
    place = tmp_path / "first"
    cli("init", place, "--recipe", "fp8_cs", "--config", "lora_tiny")
    for recipe in ([], ["mixed_precision=bf16_mixed"]):
        policy = ConfigContainer.load(place / "config.yaml", recipe).resolved().policy
        assert (policy.frozen, policy.quantized) == (("*",), not recipe)


def test_the_next_command_names_what_is_to_be_filled_in(tmp_path: Path, cli) -> None:
    assert "train --config config.yaml data.corpus=YOUR_TEXT\n" in cli("init", tmp_path / "a", "--config", "llama3_8b")
    assert cli("init", tmp_path / "b").endswith("train --config config.yaml\n")


@pytest.mark.parametrize(
    ("recipe", "config", "several"),
    [
        ("bf16_mixed", "gpt_tiny", "torchrun --nproc-per-node 2 -m mpbridge train --config config.yaml"),
        ("nvfp4", "moe_tiny", "torchrun --nproc-per-node 2 -m mpbridge train --config config.yaml"),
        ("fp8_cs", "llama3_8b", "torchrun --nproc-per-node 4 -m mpbridge train --config config.yaml data.corpus=YOUR_TEXT"),
        ("fp8_cs", "llama3_405b", "mpbridge launch --nodes 16 --gpus-per-node 8 -- train --config config.yaml data.corpus=YOUR_TEXT"),
    ],
    ids=["BF16", "a recipe of Blackwell", "a model of several GPUs", "a model of 128 GPUs"],
)  # fmt: skip
def test_the_folders_commands_are_about_its_own_recipe_and_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, config: str, several: str
) -> None:
    assert main(["init", str(tmp_path / "first"), "--recipe", recipe, "--config", config]) == 0
    monkeypatch.chdir(tmp_path / "first")
    commands = [line.partition("  #")[0].strip() for line in Path("README.md").read_text().split("```")[1].splitlines()]
    assert several in commands
    (asked,) = (command.split()[1:] for command in commands if command.startswith("mpbridge check"))
    needs_recomputation = config == "llama3_405b"
    assert main([word.replace("YOUR_TEXT", "stdlib") for word in asked]) == needs_recomputation
    assert any(command.endswith("--emulate") for command in commands) == (recipe == "nvfp4")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["che"], {"check"}),
        (["show", "bf16_par"], {"bf16_params_fp32_states"}),
        (["check", "--config", "llama3_"], {"llama3_8b", "llama3_70b", "llama3_405b"}),
        (["plan", "--recipe", "fp8_mlp"], {"fp8_mlp_only"}),
        (["plan", "--recipe", "fp8_cs"], {"fp8_cs"}),
        (["diagnose", "a_r"], {"a_run"}),
        (["diagnose", "x", "--against", "a_r"], {"a_run"}),
        (["data", "prepare", "a_r"], {"a_run"}),
        (["help", "mem"], {"memory"}),
        (["convert", "hf:x", "a1"], set()),  # a place, not a machine
        (["resume-check", "a_r"], {"a_run"}),
    ],
)
def test_bash_completes_from_the_printed_script(words: list[str], offered: set[str], tmp_path: Path, cli) -> None:
    (tmp_path / "a_run").mkdir()
    script = tmp_path / "completion.bash"
    script.write_text(cli("completion bash"), encoding="utf-8")
    ask = f'source {script}; COMP_WORDS=(mpbridge {" ".join(words)}); COMP_CWORD={len(words)}; _shtab_mpbridge; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "--norc", "-c", ask], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)  # fmt: skip
    assert set(done.stdout.split()) == offered


def test_zsh_has_an_action_for_every_argument_beside_options(cli) -> None:
    """Without one it prints the argument's help, and inserts no option."""
    lines = cli("completion zsh").splitlines()
    places = [line for line in lines if re.match(r' +"(\([^)]*\))?\*?:', line)]
    assert len(places) > 20
    assert [line for line in places if line.endswith(':"')] == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_with_every_command(shell: str, cli) -> None:
    from mpbridge.cli.main import verbs

    script = cli("completion", shell)
    assert not [verb for verb in (*verbs(), "help", "fp8_mlp_only", "llama3_8b") if verb not in script]


def tab(shell: list[str], setup: str, line: str) -> str:
    """The line of an interactive shell after the Tab key, which the shell then echoes."""
    on_a_terminal = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])", *shell]
    with subprocess.Popen(on_a_terminal, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env={**os.environ, "TERM": "xterm"}) as child:  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(f"{setup}; echo re''ady\r".encode())
            shown(child.stdout, "^ready")
            child.stdin.write(f"{line}\t\x01echo Q:\x05\r".encode())
            return shown(child.stdout, "^Q:(.*)")[1]
        finally:
            child.terminate()  # closes the terminal, which ends the shell


def shown(stream: Any, wanted: str) -> re.Match[str]:
    """The first line on the terminal that matches, without what moves the cursor or sets a colour."""
    said, end = "", time.monotonic() + 60
    while time.monotonic() < end:
        if select.select([stream], [], [], 0.1)[0]:
            said += stream.read(65536).decode(errors="replace")
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b(?:[=>]|\(B)|\r", "", said)
        if found := re.search(wanted + r"$\n", plain, re.MULTILINE):
            return found
    raise AssertionError(said)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_an_option_is_inserted_beside_settings(shell: str, tmp_path: Path, cli) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "_mpbridge").write_text(cli("completion", shell), encoding="utf-8")
    command, setup = {
        "zsh": (["zsh", "-f", "-i"], f"PROMPT='% '; fpath=({tmp_path} $fpath); autoload -Uz compinit; compinit -u -D"),
        "fish": (["fish", "--no-config", "-i"], f"source {tmp_path}/_mpbridge"),
    }[shell]
    assert tab(command, setup, "mpbridge check --conf").strip() == "mpbridge check --config"


def test_settings_that_check_offers_go_into_the_folder(tmp_path: Path, cli) -> None:
    asked = ["parallel.tensor_model_parallel_size=2", "ddp.use_distributed_optimizer=true"]
    printed = cli("init", tmp_path / "big", "--config", "llama3_8b", "--world-size", "64", *asked)
    said = " --target {} --world-size 64 data.corpus=YOUR_TEXT (README.md has what follows)"
    assert said.format("h100") in printed  # on this machine it would be judged by its own memory
    printed = cli("init", tmp_path / "b", "--config", "llama3_8b", "--world-size", "64", "--target", "B200")
    assert said.format("b200") in printed
    assert "--target b200 --world-size 64" in (tmp_path / "b/README.md").read_text()
    assert "b200" in cli("init", tmp_path / "no", "--target", "b20O", code=2)
    made = ConfigContainer.load(tmp_path / "big/config.yaml")
    assert (made.parallel.tensor_model_parallel_size, made.ddp.use_distributed_optimizer) == (2, True)
    assert "launch --nodes 8 --gpus-per-node 8" in (tmp_path / "big/README.md").read_text()
    assert "recipe.yaml's" in cli("init", tmp_path / "no", "mixed_precision.fp8=hybrid", code=2)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(("given", "world", "batch"), [({}, 1, 8), ({}, 4, 16), ({"micro_batch_size": 1}, 64, 64), ({"micro_batch_size": 3}, 1, 9), ({"micro_batch_size": None}, 3, 9)])  # fmt: skip
def test_a_batch_that_is_not_set_is_one_that_the_ranks_can_divide(
    given: dict[str, Any], world: int, batch: int
) -> None:
    model = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 384}
    made = ConfigContainer(mixed_precision="bf16", model=model, train=given, data={"seq_length": 64})
    assert made.resolved(world, training=False).train["global_batch_size"] == batch


def test_settings_of_a_section_do_not_take_the_folders_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "first", "logger.precision_every=20", "checkpoint.save=elsewhere"]) == 0
    made = load_yaml((tmp_path / "first/config.yaml").read_text())
    assert made["logger"] == {"log_dir": "run", "precision_every": 20}
    assert made["checkpoint"] == {"save": "elsewhere", "load": "elsewhere", "save_interval": 50}


def test_what_follows_emulates_a_recipe_that_this_machine_does_not_run(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for recipe, words in (("bf16_mixed", ""), ("fp8_cs", " --emulate")):
        printed = cli("init", recipe, "--recipe", recipe)
        check, train = (f"mpbridge {verb} --config config.yaml{words}" for verb in ("check", "train"))
        assert f"next: cd {recipe} && {check} && {train}\n" in printed
