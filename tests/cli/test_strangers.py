"""A stranger's file does nothing: no verb runs what it names, writes where a link of it leads, or prints what would command a terminal."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from mpbridge.cli.main import main, verb_of, verbs
from mpbridge.common.tables import table
from tests.settings.huggingface import published

ROOT = Path(__file__).resolve().parents[2]
CODE = "evil.py:fn"
"""What the files name: a module in the working directory."""

# --- code: place in a file -> the file's text; every verb that reads such a file is given it -----------------------------------------------
RUN_FILES = {
    "recipe": f"mixed_precision: {CODE}",
    "recipe as a module": "mixed_precision: evil:fn",
    "section": f"mixed_precision: {{recipe: {CODE}}}",
    "stages": f"mixed_precision: [{{recipe: bf16_mixed, until: 2}}, {{recipe: {CODE}}}]",
    "extends": f"mixed_precision: {{extends: {CODE}}}",
    "recipe file": "mixed_precision: recipe.yaml",
    "run extends": f"extends: {CODE}",
    "activation": "model: {activation_func: 'evil:fn', init_method: evil.fn}",
    "layers": "model: {transformer_layer_spec: 'evil:fn', module_spec: [evil, fn]}",
    "optimizer": "optimizer: {optimizer: 'evil:fn'}",
    "engine": "engine: evil:fn",
    "corpus": "data: {corpus: evil.py, tokenizer: 'evil:fn'}",
    # the size of the vocabulary is given: the run is not refused before its tokenizer is made
    "tokenizer": "data: {corpus: text.txt, tokenizer: 'evil:fn'}\nmodel: {vocab_size: 384, num_layers: 1}",
    "tracker": "logger: {trackers: ['evil:fn']}",
    "python tag": "mixed_precision: !!python/object/apply:evil.fn []",
    "python name": "mixed_precision: !!python/name:evil.fn",
    "python module": "mixed_precision: !!python/module:evil",
    "target": "mixed_precision: {_target_: evil.fn, _call_: true}",
}
RECIPE_FILES = {
    "extends": f"extends: {CODE}",
    "a module": "extends: evil:fn",
    "python tag": "!!python/object/apply:evil.fn []",
    "quantization": "extends: bf16_mixed\nfp8_recipe: evil.fn",
    "modules": f"extends: bf16_mixed\nregions: [{{module: '*', recipe: {CODE}}}]",
    "target": "_target_: evil.fn",
}
OTHERS = {
    "script.sh": "$(python evil.py)\n`python evil.py`\npython evil.py && torchrun pretrain_gpt.py --bf16 --spec evil fn --fp8-format ${X:=$(python evil.py)}",
    "job.py": "import evil\nevil.fn()\nconfig = evil.fn()\ndef recipe():\n    import evil\n    return evil.fn()",
    "titan.toml": "[experimental]\ncustom_import = 'evil'\n[model]\nconverters = ['evil']\n[mixed]\nx = 'evil:fn'",
    "zero.json": json.dumps({"bf16": {"enabled": True}, "optimizer": {"type": "evil.fn"}, "py/object": "evil.fn"}),
    "nemo.yaml": "trainer: {_target_: evil.fn, precision: bf16-mixed, plugins: {_target_: evil.fn}}",
    "torchtune.yaml": "model: {_component_: evil.fn}\ndtype: bf16",
    "args.pt": "cevil\nfn\n(tR.",
    ".metadata": "cevil\nfn\n(tR.",
    "machine.yaml": f"!!python/object/apply:evil.fn []\nextends: {CODE}",
    "tensors.pt": "cevil\nfn\n(tR.",
}
FOLDER = {"model_type": "evil", "architectures": ["EvilForCausalLM"], "auto_map": {"AutoConfig": "evil.fn", "AutoModelForCausalLM": "evil.fn"}, "trust_remote_code": True}  # fmt: skip
SERVED = {
    "config.json": FOLDER | {"model_type": "nemotron_h", "hybrid_override_pattern": "M*-", "quantization_config": {"quant_method": "evil.fn", "ignore": ["evil.fn"], "config_groups": {"evil.fn": {"format": CODE}}}},
    "hf_quant_config.json": {"py/object": "evil.fn", "quantization": {"quant_algo": CODE, "exclude_modules": ["evil.fn"]}},
    "contract.json": {"py/object": "evil.fn", "schema": 1, "recipe": CODE, "tensors": {"evil.fn": {"sha256": CODE}}, "run": {"recipe": CODE, "engine": "evil:fn", "policy": {"py/object": "evil.fn"}}},
    "model.safetensors.index.json": {"weight_map": {"evil.fn": "../evil.py"}},
    "manifest.json": {"py/object": "evil.fn", "files": {"../evil.py": {"sha256": CODE}}},
    "model.sig": {"py/object": "evil.fn", "mediaType": CODE},
    "precision.intoto.jsonl": {"payload": "evil", "payloadType": CODE, "signatures": [{"keyid": "evil.fn", "sig": CODE}]},
}  # fmt: skip
"""Folders to serve, to publish or to check: what tools of inference write, and mpbridge's own records."""
TOKENIZER = {"tokenizer_class": "evil.fn", "auto_map": {"AutoTokenizer": ["evil.fn", None]}}

ON_RUNS = ("check", "plan", "memory", "estimate", "layouts", "recommend", "simulate", "tune", "rehearse", "train", "export", "init", "launch", "convert", "certify", "resume-check")  # fmt: skip


def commands(folder: Path) -> list[list[str]]:
    """Writes the files into `folder`; every verb with every file that it may be given, by option and by name."""
    (folder / "evil.py").write_text("import pathlib\npathlib.Path('ran').touch()\ndef fn(*_, **__): pathlib.Path('ran').touch()\n")  # fmt: skip
    found: list[list[str]] = []

    def file(name: str, text: str) -> str:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        return name

    more = {
        "export": ["--to", "megatron-lm"], "train": ["train.train_iters=1"], "init": ["out/first"], "rehearse": ["--steps", "1", "--out", "out/r", "--recipes", "fp32", "model.num_layers=1", "train.seq_length=16"],
        "tune": ["--out", "out/t.yaml"], "resume-check": ["run"], "launch": ["--nodes", "1", "--gpus-per-node", "1", "--", "train"],
    }  # fmt: skip
    for i, text in enumerate(RUN_FILES.values()):
        base = "" if text.startswith("extends") else f"extends: {ROOT}/configs/gpt_tiny.yaml\n"
        run = file(f"run{i}.yaml", base + text)
        # the verbs load a configuration by one function: all of them with the first file, and each file with a third of them in turn
        for verb in ON_RUNS if i == 0 else ("train", "rehearse") if "vocab_size" in text else ON_RUNS[i % 3 :: 3]:
            if verb == "launch":
                found.append([verb, *more[verb], "--config", run])
            elif verb == "convert":
                found.append([verb, run, "out/c.yaml"])
            else:
                found.append([verb, *more.get(verb, ()), "--config", run])
        found += [["compare", "bf16_mixed", run], ["import", run], ["doctor", "--machine-file", run], ["train", "--config", "gpt_tiny", f"extends={run}"]]  # fmt: skip
    file("recipe.yaml", f"extends: {CODE}")
    file("text.txt", "text " * 400)
    for i, text in enumerate(RECIPE_FILES.values()):
        recipe = file(f"recipe{i}.yaml", text)
        given = [["show", recipe], ["diff", "bf16_mixed", recipe], ["compare", "bf16_mixed", recipe], ["export", recipe, "--to", "torchtitan"]]  # fmt: skip
        given += [[verb, "--recipe", recipe] for verb in ("check", "plan", "memory", "train")]
        given += [["import", recipe], ["rehearse", "--recipes", recipe, "--steps", "1", "--out", "out/r2"], ["words", recipe]]  # fmt: skip
        given += [["plan", f"mixed_precision={recipe}"], ["resume-check", "run", "--recipe", recipe]]
        found += given if i == 0 else given[i % 3 :: 3]
    for name, text in OTHERS.items():
        place = file(name, text)
        found += [["import", place], ["compare", place, "bf16_mixed"], ["check", "--config", place], ["estimate", "--target", "h100", "--machine-file", place]]  # fmt: skip
        found += [["certify", "bf16_with_mxfp8_mixed", "--tensors", place], ["data", "inspect", place], ["data", "prepare", place, "--out", "out/d", "--cache", "out/cache"]]  # fmt: skip
    file("hf/config.json", json.dumps(FOLDER))
    file("hf/tokenizer_config.json", json.dumps(TOKENIZER))
    file("hf/tokenizer.model", "evil")
    file("hf/configuration_evil.py", "import evil")
    found += [[verb, "--config", "hf:hf"] for verb in ("check", "train", "memory")]
    found += [["convert", "hf:hf", "out/x.yaml"], ["convert", "hf:hf", "ckpt:out/ck"], ["data", "inspect", "--tokenizer", "hf:hf"], ["data", "inspect", "--tokenizer", "evil:fn"]]  # fmt: skip
    # a run's folder, which is a checkpoint too
    for name in ("run/step_00000001/.metadata", "run/step_00000001/common.pt", "run/step_00000001/__0_0.distcp"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        file(name, "cevil\nfn\n(tR.")
    for name in ("precision.json", "timing.json", "summary.json", "telemetry.jsonl", "metrics.jsonl", "step_00000001/manifest.json", "step_00000001/state.json", "step_00000001/config.yaml"):  # fmt: skip
        file(f"run/{name}", json.dumps({"py/object": "evil.fn", "iteration": 1, "loss": 1.0, "recipe": CODE, "config": {"mixed_precision": CODE}}))  # fmt: skip
    found += [["audit", "run"], ["diagnose", "run"], ["precision", "run", "--out", "out/p.html"], ["plot", "run", "--no-picture"]]  # fmt: skip
    found += [["resume-check", "run"], ["convert", "ckpt:run", "hf:out/hf"], ["convert", "ckpt:run", "ckpt:out/ck2"], ["import", "run/step_00000001"]]  # fmt: skip
    found += [["estimate", "--against", "run"], ["recommend", "--runs", "run"], ["train", "checkpoint.load=run", "train.train_iters=1"], ["check", "checkpoint.load=run"]]  # fmt: skip
    found += [["report", "run"], ["disclose", "run"], ["disclose", "run", "--mllog", "out/log"], ["disclose", "run/step_00000001", "--run", "run"], ["disclose", "run/step_00000001", "--sign", "key.pem", "--publish"]]  # fmt: skip
    for i, left in enumerate(("", *SERVED)):  # each of them may be what another one hides behind
        for name, data in SERVED.items():
            if name != left:
                file(f"served{i}/{name}", json.dumps(data))
        found += [["contract", f"served{i}"], ["contract", f"served{i}", "--run", "run", "--engine", "vllm,sglang"], ["convert", f"hf:served{i}", f"ckpt:out/s{i}"], ["mismatch", "run", f"served{i}", "--tokens", "evil.py"]]  # fmt: skip
        found += [["check", "--config", f"hf:served{i}"], ["disclose", f"served{i}", "--run", "run", "--sign", "key.pem"], ["verify", f"served{i}", "--key", "key.pub"]]  # fmt: skip
    with suppress(ImportError):  # the extra disclose
        write_keys(folder)
    found += [["tune", "--checkpoint", "run", "--out", "out/t2.yaml"]]
    return found


def write_keys(folder: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key = ec.generate_private_key(ec.SECP256R1())
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (folder / "key.pub").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


WATCH = """
import json, os, sys
from pathlib import Path

here, work = os.getcwd(), json.loads(sys.stdin.read())
seen, now = [], [None]

def watch(event, args):
    if now[0] is None:
        return
    if event == "import" and str(args[0]).partition(".")[0] in ("evil", "configuration_evil"):
        seen.append([now[0], event, str(args[0])])
    elif event in ("exec", "compile") and here in (place := str(getattr(args[0], "co_filename", args[-1]))) and not place.endswith("_remote_module_non_scriptable.py"):
        # torch before 2.7 writes that module of its own into the folder for temporary files
        seen.append([now[0], event, str(args)])
    elif event == "open" and isinstance(args[0], (str, bytes)) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        place = os.path.abspath(os.fsdecode(args[0]))
        if not place.startswith((here + "/out", "/dev/null", "/dev/shm", os.environ["TMPDIR"])):
            seen.append([now[0], "write", place])
    elif event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "socket.connect", "socket.getaddrinfo", "ctypes.dlopen"):
        # a torch built for CUDA asks the system for its libraries
        if (event != "ctypes.dlopen" or here in str(args[0])) and args[:2] != ("/sbin/ldconfig", ["/sbin/ldconfig", "-p"]):
            seen.append([now[0], event, str(args)[:300]])
    elif event == "pickle.find_class" and "evil" in str(args):
        seen.append([now[0], event, str(args)])

from mpbridge.cli.main import main, verbs
sys.addaudithook(watch)
codes = []
for words in work:
    now[0] = words
    try:
        codes.append(main(words))
    except BaseException as error:
        codes.append(repr(error))
    now[0] = None
print("\\n" + json.dumps([codes, seen]))
"""


def watched(folder: Path, work: list[list[str]]) -> list[tuple[list[str], str, str]]:
    """What the commands did that a stranger's file may not cause, seen by CPython itself: (command, event, detail)."""
    (folder / "out").mkdir(exist_ok=True)
    (folder / "tmp").mkdir(exist_ok=True)
    place = {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "TMPDIR": f"{folder}/tmp", "MPLCONFIGDIR": f"{folder}/tmp", "HOME": f"{folder}/tmp", "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    done = subprocess.run([sys.executable, "-c", WATCH], input=json.dumps(work), cwd=folder, env=os.environ | place, capture_output=True, text=True, check=False, timeout=900)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    codes, seen = json.loads(done.stdout.splitlines()[-1])
    assert [(words, code) for words, code in zip(work, codes, strict=True) if not isinstance(code, int)] == []
    return [tuple(one) for one in seen]


@pytest.mark.timeout(1200)
def test_nothing_that_a_file_names_is_run(tmp_path: Path) -> None:
    work = commands(tmp_path)
    assert watched(tmp_path, work) == []
    assert not (tmp_path / "ran").exists()


def test_every_verb_that_reads_a_configuration_is_given_them() -> None:
    modules = {verb: verb_of(verb).ARGUMENTS for verb in verbs()}
    assert {verb for verb, arguments in modules.items() if "--config" in [one.name for one in arguments]} <= set(ON_RUNS)  # fmt: skip


def test_what_the_user_names_runs_and_is_seen(tmp_path: Path) -> None:
    commands(tmp_path)
    seen = watched(tmp_path, [["show", CODE]])
    assert {event for _, event, _ in seen} >= {"exec"}
    assert (tmp_path / "ran").exists()


TINY = ["train", "train.train_iters=1", "train.eval_iters=0", "logger.log_dir=run", "model.num_layers=1"]  # fmt: skip

# --- outputs -------------------------------------------------------------------------------------------------------------------------------
OUTPUTS: list[tuple[list[str], tuple[str, ...]]] = [
    (["plot", "run"], ("run/curves.png",)),
    (["plot", "run", "--out", "x.png"], ("x.png",)),
    (["precision", "run"], ("run/precision.html",)),
    (["diagnose", "run", "--out", "page.html"], ("page.html",)),
    (["estimate", "--config", "llama3_8b", "--target", "h100", "--plot", "time.png"], ("time.png",)),
    (["import", "--args", "--bf16", "--write", "mine.yaml"], ("mine.yaml",)),
    (["init", "first"], ("first/config.yaml",)),
    (["convert", "hf:hf", "llama.yaml"], ("llama.yaml",)),
    (TINY, ("run/precision.json",)),
    (TINY, ("run/summary.json", "run/timing.json", "run/events.jsonl")),
]
"""A command -> files that it would write."""


@pytest.mark.parametrize("kind", ["link", "dangling", "hard link"])
def test_no_output_follows_a_link(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    touched = []
    # one function opens every output: all of them with a link, a part of them with the other two kinds
    for number, (words, names) in list(enumerate(OUTPUTS))[:: 1 if kind == "link" else 3]:
        home, victim = tmp_path / str(number), tmp_path / f"victim{number}"
        for name in ("run/metrics.jsonl", "hf/config.json", *names):
            (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "hf/config.json").write_text(json.dumps(published.LLAMA_3_8B))
        rows = [{"iteration": step, "loss": 3.0, "grad_norm": 1.0, "lr": 1e-3} for step in range(1, 20)]
        (home / "run/metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        if kind != "dangling":
            victim.write_text("mine")
        for name in names:
            (home / name).hardlink_to(victim) if kind == "hard link" else (home / name).symlink_to(victim)
        monkeypatch.chdir(home)
        code = main(words)
        said = capsys.readouterr().err
        kept = victim.read_text() == "mine" if victim.exists() and kind != "dangling" else not victim.exists()
        touched += [] if kept else [words]
        # a run goes on without its side files and says so
        assert (code == 2 and names[0] in said) or (words == TINY and any(name in said for name in names)), words
    assert touched == []


# --- control characters --------------------------------------------------------------------------------------------------------------------
SHOUT = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\x08\r\u202e"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def loud(folder: Path) -> list[list[str]]:
    """Files whose every text holds commands to a terminal, and the verbs that show them."""
    run = folder / "run"
    run.mkdir()
    one = {"stage": "live", "step": 2, "reason": SHOUT, "recipe": SHOUT, "ok": False, "facts": {f"weights moved {SHOUT}": [SHOUT, SHOUT, SHOUT]}, "faults": [SHOUT], "not_observed": {SHOUT: SHOUT}}  # fmt: skip
    (run / "precision.json").write_text(json.dumps({"recipe": SHOUT, "engine": SHOUT, "audit": {"history": [one, one | {"step": 3, "facts": {}}]}, "config": {"model": {"num_layers": SHOUT}}, "versions": {SHOUT: SHOUT}}))  # fmt: skip
    rows = [{"iteration": step, "loss": 3.0 if step < 30 else "nan", "grad_norm": 1.0, "lr": 1e-3, "recipe": SHOUT, "phase": SHOUT} for step in range(1, 40)]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (run / "events.jsonl").write_text(json.dumps({"iteration": 29, "event": SHOUT, "text": SHOUT}) + "\n")
    escaped = json.dumps(SHOUT)
    for name, text in {
        "recipe.yaml": f"extends: bf16_mixed\n{escaped}: 1\n",
        "extends.yaml": f"extends: {escaped}\n",
        "run.yaml": f"model: {{{escaped}: 1, num_layers: {escaped}}}\nmixed_precision: {escaped}\nengine: {escaped}\n",
        "raw.yaml": SHOUT,
        "machine.yaml": f"machine: {escaped}\npeak: {escaped}\n",
        "job.sh": f"pretrain_gpt.py --bf16 --{SHOUT} {SHOUT} --fp8-format '{SHOUT}'",
        "ds.json": json.dumps({"bf16": {"enabled": SHOUT}, SHOUT: SHOUT}),
        "job.py": f"# {SHOUT}",
        "hf/config.json": json.dumps({"model_type": SHOUT, "architectures": [SHOUT], "torch_dtype": SHOUT}),
        SHOUT: "x",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    shown = [[verb, name] for verb in ("show", "import", "words") for name in ("recipe.yaml", "extends.yaml", "raw.yaml", "job.sh", "ds.json", "job.py", SHOUT)]  # fmt: skip
    shown += [[verb, "--config", name] for verb in ("check", "plan", "export") for name in ("run.yaml", "raw.yaml", "hf:hf", SHOUT)]  # fmt: skip
    shown += [["audit", "run"], ["audit", "run", "--json"], ["diagnose", "run"], ["precision", "run"], ["plot", "run"], [SHOUT], ["check", f"--{SHOUT}"], ["check", f"model.{SHOUT}={SHOUT}"]]  # fmt: skip
    shown += [["compare", "bf16_mixed", "job.sh"], ["compare", "ds.json", "job.sh"], ["estimate", "--target", "h100", "--machine-file", "machine.yaml"]]  # fmt: skip
    return [words if words[0] != "export" else [*words, "--to", "megatron-lm"] for words in shown]


def test_no_control_character_of_a_file_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cli) -> None:  # fmt: skip
    work = loud(tmp_path)
    monkeypatch.chdir(tmp_path)
    found = []
    for words in work:
        main(words)
        out, err = capsys.readouterr()
        assert out or err
        found += [(words, text) for text in CONTROL.findall(out + err)]
    assert found == []
    assert "\\x1b]0;owned" in cli("audit run", code=1)  # shown, not dropped


def test_a_terminal_too_is_told_nothing_by_a_file() -> None:
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system=None, width=200).print(table(SHOUT, [SHOUT], [[SHOUT]], note=SHOUT))  # fmt: skip
    assert CONTROL.findall(out.getvalue()) == []


def test_everything_is_printed_by_the_functions_that_escape() -> None:
    home = ROOT / "mpbridge"
    kept = {
        "cli/text.py",
        "common/report/console.py",
        "training/checkpoint/converter_process.py",
    }  # the last one: to a pipe
    found = set()
    for path in home.rglob("*.py"):
        if "te_cpu" in path.parts:
            continue
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if re.search(r"\bprint\(|\.write\(", text) else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write"):  # fmt: skip
                found.add(str(path.relative_to(home)))
    assert found - kept == set()
