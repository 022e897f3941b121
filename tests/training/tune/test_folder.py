"""A causal LM in a Hugging Face folder: tuned as it lies there, and refused where it is code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import mpbridge
from mpbridge.cli.main import main

NVFP4 = "bf16_with_nvfp4_mixed"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"Line {i}: the quick brown fox jumps over {i} lazy dogs." for i in range(400)))
    return path


def folder_of(tmp_path: Path, **config: Any) -> Path:
    from safetensors.torch import save_file

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    save_file({"w": torch.ones(2, 2)}, folder / "model.safetensors")
    return folder


def tune(folder: Path, text: Path, out: Path, *more: str) -> int:
    sizes = ["--batches", "4", "--unseen", "2", "--seq-length", "32", "--batch-size", "1"]
    return main(["tune", "--hf", str(folder), "--text", str(text), "--recipe", NVFP4, "--out", str(out), *sizes, *more])


def test_a_model_made_from_a_config_is_tuned_by_its_own_names(tmp_path: Path, text: Path, capsys: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    out = tmp_path / "tuned.yaml"
    assert tune(tmp_path / "model", text, out) in (0, 1)
    printed = capsys.readouterr().out
    assert "bytes are its tokens" in printed
    assert "verdict:" in printed
    assert f'mpbridge.emulate(model, "{out}")' in printed
    content = yaml.safe_load(out.read_text())
    assert f"transformers {transformers.__version__}" in content["evidence"]["found by"]
    assert set(content["evidence"]["scores"]) == {
        "self_attn.q_proj + self_attn.k_proj + self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj + mlp.up_proj",
        "mlp.down_proj",
    }
    assert main(["show", str(out)]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    emulation = mpbridge.emulate(model.bfloat16(), out, compiled=False)
    assert len(emulation.plugs) + len(emulation.high) == 3 * 7
    model(input_ids=torch.zeros(1, 32, dtype=torch.long), labels=torch.zeros(1, 32, dtype=torch.long)).loss.backward()
    emulation.detach()


def test_code_and_pickles_are_refused_before_anything_is_loaded(tmp_path: Path, text: Path, capsys: Any) -> None:
    out = tmp_path / "tuned.yaml"
    folder = folder_of(tmp_path, auto_map={"AutoModelForCausalLM": "evil.Model"})
    assert tune(folder, text, out) != 0
    assert "auto_map" in capsys.readouterr().err
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": "evil.Tokenizer"}}))
    assert tune(folder, text, out) != 0
    assert "tokenizer_config.json names Python code" in capsys.readouterr().err
    (folder / "tokenizer_config.json").unlink()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert tune(folder, text, out) != 0
    assert "pickled weights" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("recipe", "target", "why"),
    [
        ("bf16_with_mxfp8_mixed", "h100", "MXFP8 needs compute capability 10.0 or later"),
        (NVFP4, "h100", "NVFP4 needs compute capability 10.0 or later"),
        ("bf16_with_fp8_current_scaling_mixed", "a100", "needs compute capability 8.9 or later"),
    ],
)
def test_a_recipe_that_the_target_does_not_run_is_refused_before_anything_is_loaded(
    recipe: str, target: str, why: str, tmp_path: Path, text: Path, capsys: Any
) -> None:
    folder, out = folder_of(tmp_path), tmp_path / "tuned.yaml"
    command = ["tune", "--hf", str(folder), "--text", str(text), "--recipe", recipe, "--target", target]
    assert main([*command, "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert f"the recipe does not run on {target.upper()}" in said
    assert why in said
    assert "mpbridge recommend" in said
