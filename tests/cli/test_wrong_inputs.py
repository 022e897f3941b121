"""Sixty wrong inputs: one message each, of at most six lines, that names what was found, what was expected and the cure; no traceback."""

from __future__ import annotations

import pytest

FILES = {
    "ck/step_00000010/state.json": "{}", "bad.json": '{"a": nope', "array/config.json": "[1, 2]", "big/config.json": '{"model_type": "llama", "hidden_size": "big"}',
    "empty.yaml": "", "broken.yaml": "model: [1, 2", "section.yaml": "modle: {num_layers: 2}\n", "base.yaml": "extends: nowhere\n",
    "heads/config.json": '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 5, "vocab_size": 100, "intermediate_size": 128}',
    "itself.yaml": "extends: itself.yaml\n", "twice.yaml": "model: {num_layers: 2}\nmodel: {num_layers: 3}\n", "tab.yaml": "model:\n\tnum_layers: 2\n", "hf/config.json": '{"model_type": "llama"}', "both.yaml": "bf16: true\nfp8: hybrid\nfp4: e2m1\n", "text.txt": "not a run", "code.py": "x = 1\n",
    "own.py": "from mpbridge import *\nfrom pathlib import Path\ndef mine(): return Path\n",
}  # fmt: skip
WRONG: dict[str, tuple[int, str, str]] = {
    # command line -> (exit code, what was found, what was expected or the cure)
    "chek": (2, "'chek'", "nearest: check"),
    "help chek": (2, "'chek'", "nearest: check"),
    "check ''": (2, "mpbridge check ''", "expected a value"),
    "init ''": (2, "mpbridge init ''", "expected a value"),
    "import --args ''": (2, "mpbridge import --args ''", "expected a value"),
    "check model..num_layers=3": (2, "'model..num_layers=3'", "expected key=value"),
    "check model.num_layers=1e9": (2, "model.num_layers=1000000000", "expected 0 to 10000"),
    "check model.num_experts=3 model.moe_router_topk=9 --config moe_tiny": (
        2,
        "'num_experts'",
        "nearest: num_moe_experts",
    ),
    "check model.moe_router_topk=9 --config moe_tiny": (2, "moe_router_topk=9", "model.num_moe_experts=4"),
    "check optimizer.lr=nan": (2, "'nan'", "expected a finite number"),
    "check checkpoint.load=ck": (2, "step_00000010/manifest.json is missing", "restore the file"),
    "check --te two": (2, "'two'", "2.11"),
    "check --config hf:array": (2, "array/config.json", "expected an object"),
    "check --config hf:big": (2, 'hidden_size="big"', "expected a whole number"),
    "check --machine-file text.txt": (2, "text.txt", "mpbridge calibrate"),
    "calibrate --out gone/m.yaml": (2, "--out gone/m.yaml", "folder gone does not exist"),
    "import --from megatron-lm large.yaml": (2, "more than 4,000,000 bytes", "the limit for a configuration"),
    "compare bf16_mixed": (2, "required: B", "help compare"),
    "compare bad.json bf16_mixed": (2, "bad.json: cannot be read: line 1", "expected ',' or '}'"),
    "convert hf:hf hf:out": (2, "convert hf:hf hf:out", "expected hf:DIR ckpt:DIR"),
    "recommend --target h100 --by speed": (2, "'speed'", "'time'"),
    "simulate --rank 5": (2, "rank 5", "ranks 0 to 0"),
    "memory --config deepseek_v3_671b --world-size 7": (2, "7 processes", "pipeline 8"),
    "tune --recipe fp8_cs --budget memory=-3GB": (2, "-3GB", "memory=40GB"),
    "check --config": (2, "--config", "expected one argument"),
    "check --config nope": (2, "'nope'", "llama3_8b"),
    "check --config llama3_9b": (2, "'llama3_9b'", "nearest: llama3_8b"),
    "check --config folder": (2, "is a folder", "hf:folder"),
    "check --config empty.yaml": (2, "model.num_layers is missing", "mixed_precision=bf16_mixed"),
    "check --config broken.yaml": (2, "line 1, column 13", "expected ',' or ']'"),
    "check --config section.yaml": (2, "'modle'", "nearest: model"),
    "check --config base.yaml": (2, "'nowhere'", "gpt_tiny"),
    "check --config itself.yaml": (2, "itself.yaml -> itself.yaml", "extends itself"),
    "check --config text.txt": (2, "got str", "expected a mapping of sections"),
    "check --config hf:gone": (2, "gone", "config.json"),
    "check --config hf:folder": (2, "no config.json in it (found: nothing)", "Hugging Face's format"),
    "check --config hf:hf": (2, "num_hidden_layers, hidden_size, num_attention_heads", "are missing"),
    "check --config hf:heads": (2, "hidden_size is not a multiple of num_attention_heads=5", "give head_dim"),
    "check --config wide.yaml": (2, "byte 0xff at 0", "not text in UTF-8"),
    "check --config twice.yaml": (2, "line 2, column 1", "key 'model' appears twice"),
    "check --config tab.yaml": (2, "line 2, column 1", "cannot start any token"),
    "check parallel.tensor_model_parallel_size=2.5": (2, "2.5", "expected a whole number"),
    "check ddp.grad_reduce_in_fp32=maybe": (2, "'maybe'", "expected true or false"),
    "check scheduler.lr_decay_style=exponental": (2, "'exponental'", "inverse-square-root"),
    "check logger.trackers=[nonsense]": (2, "'nonsense'", "tensorboard, wandb"),
    "check model.num_attention_heads=3 model.hidden_size=128": (2, "model.hidden_size=128", "model.kv_channels"),
    "check train.global_batch_size=7 --world-size 8": (2, "train.global_batch_size=7", "use a multiple of 8"),
    "check --target qqq": (2, "'qqq'", "h100"),
    "check --recipe bf16_mxed": (2, "'bf16_mxed'", "nearest: bf16_mixed"),
    "check --recipe empty.yaml": (2, "empty.yaml: empty", "extends: bf16_mixed"),
    "check --recipe both.yaml": (2, "fp8 and fp4 are both on", "set one of them to null"),
    "check --recipe code.py:nope": (2, "'nope'", "there are none"),
    "check --recipe own.py:nope": (2, "'nope'", "(known: mine)"),
    "check --recipe code.py:x": (2, "x is of type int", "expected a function that returns a MixedPrecisionConfig"),
    "check --recipe gone.py:fn": (2, "gone.py: no such file", "FILE.py:FUNCTION"),
    "check --recipe bf16 mixed_precision=fp32": (2, "recipe bf16 and mixed_precision=fp32 both", "use only one"),
    "check --engine fsdp3": (2, "'fsdp3'", "'fsdp2'"),
    "check --target h1000": (2, "'h1000'", "nearest: h100"),
    "check --target h100 --machine-file m.yaml": (2, "--machine-file m.yaml", "use only one"),
    "check --target h100 --cuda twelve": (2, "'twelve'", "12.8"),
    "check --machine-file gone.yaml": (2, "gone.yaml: No such file", "mpbridge calibrate"),
    "check --gpus 8": (2, "--gpus", "nearest: --world-size"),
    "check --jsn": (2, "--jsn", "nearest: --json"),
    "check --world-size 0": (2, "--world-size 0", "expected at least 1"),
    "check --world-size two": (2, "'two'", "expected one such as 1000"),
    "check --world-size 3 parallel.tensor_model_parallel_size=2": (2, "3 processes", "tensor 2"),
    "check model.hiden_size=3": (2, "'hiden_size'", "nearest: hidden_size"),
    "check model.num_layers=two": (2, "'two'", "expected a whole number"),
    "check model.num_layers": (2, "'model.num_layers'", "expected key=value"),
    "check model.num_layers=": (2, "no value", "write null"),
    "check optimizer.lr=-1": (2, "optimizer.lr=-1", "expected a number at least 0"),
    "check model=3": (2, "model=3", "model.key=value"),
    "check data.corpus=nope": (2, "data.corpus=nope", "no such file, folder, glob"),
    "check checkpoint.load=nope": (2, "no such folder", "expected a folder with step_"),
    "check logger.log_dir=text.txt": (2, "is a file", "expected a folder"),
    "check mixed_precision.fp8=true": (2, "a truth value", "e4m3, hybrid or null"),
    "check mixed_precision.fp8=e9m9": (2, "'e9m9'", "e4m3, hybrid or null"),
    "check scheduler.lr_warmup_iters=10 scheduler.lr_decay_iters=5": (2, "lr_warmup_iters=10", "does not end before"),
    "import code.py --from megatron": (2, "'megatron'", "megatron-lm"),
    "plan --on-conflict maybe": (2, "'maybe'", "'warn'"),
    "show": (2, "NAME", "help show"),
    "show gone.yaml": (2, "gone.yaml", "No such file"),
    "show fp8_cs --layers 0": (2, "--layers 0", "expected at least 1"),
    "memory parallel.tensor_model_parallel_size=3": (1, "num_attention_heads 4 by tensor 3", "another parallel size"),
    "memory --rank 99": (2, "rank 99", "expected 0 to 0"),
    "layouts": (2, "has no rates in the table", "name a --target"),
    "rehearse --steps 0": (2, "--steps 0", "expected at least 1"),
    "show qqq": (2, "'qqq'", "mpbridge list shows the names"),
    "estimate --target h100 --recipe mxfp8": (1, "compute capability 10.0", "What works"),
    "estimate --against nope": (2, "nope/timing.json", "logger.log_dir=nope"),
    "estimate --price free": (2, "'free'", "as in 2.5"),
    "layouts --target h100 --most 0": (2, "--most 0", "expected at least 1"),
    "recommend --recipe bf16": (2, "--recipe bf16_mixed", "omit it"),
    "train train.train_iters=null": (2, "train.train_iters is missing", "train.train_iters=200"),
    "train --recipe mxfp8": (1, "cannot run this recipe", "--emulate"),
    "train --gpus 8": (2, "--gpus", "torchrun --nproc-per-node"),
    "launch --nodes 2 --gpus-per-node 8": (2, "is missing", "-- train --config"),
    "init new --recipe nope": (2, "'nope'", "bf16_mixed"),
    "init /proc/new": (2, "/proc/new cannot be created", "a path where one can be created"),
    "init new --target h10O": (2, "'h10O'", "h100"),
    "report folder": (2, "folder/metrics.jsonl", "logger.log_dir=DIR"),
    "report text.txt": (2, "no readable step", "expected the metrics.jsonl"),
    "plot text.txt --width 3": (2, "--width 3", "expected at least 10"),
    "audit folder": (2, "has no audits", "logger.log_dir=DIR"),
    "resume-check": (2, "arguments are required: CKPT (", "help resume-check"),
    "resume-check text.txt": (2, "text.txt: a file", "expected a folder with step_"),
    "export fp8_cs --to nemo3": (2, "'nemo3'", "megatron-lm"),
    "import gone.yaml": (2, "gone.yaml: no such file", "--args"),
    "import hf": (2, "a model in Hugging Face's format", "mpbridge check --config hf:hf"),
    "import hf:hf": (2, "a model in Hugging Face's format", "mpbridge check --config hf:hf"),
    "import text.txt": (2, "found str", "expected a mapping"),
    "words bf17": (2, "'bf17'", "nearest: bf16"),
    "convert nope out": (2, "convert nope out", "expected hf:DIR ckpt:DIR"),
    "tune": (1, "quantizes nothing", "--recipe fp8_cs"),
    "tune --recipe fp8_cs --budget lots": (2, "'lots'", "memory=40GB"),
    "on-cpu gone.py": (2, "gone.py: no such file", "expected a Python script"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("wrong")
    for name, text in FILES.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text)
    (made / "folder").mkdir()
    (made / "large.yaml").write_bytes(b"a" * 5_000_000)
    (made / "wide.yaml").write_text("model: {num_layers: 2}\n", encoding="utf-16")
    return made


def test_there_are_sixty():
    assert len(WRONG) >= 60


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_input_gets_one_message_with_found_expected_and_cure(folder, monkeypatch, cli, line):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, found, expected = WRONG[line]
    err = cli(line, code=code, error=True)
    assert 1 <= len(err.splitlines()) <= 6
    assert "Traceback" not in err
    assert found in err
    assert expected in err
