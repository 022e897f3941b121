"""Weights taken from folders and given back: every engine reads them, bits stay, widened FP8 has the right values, wrong weights are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mpbridge.cli.main import main
from mpbridge.common.errors import BadValue, CheckpointError, Contradiction
from mpbridge.settings.container import ConfigContainer
from mpbridge.training.checkpoint.reader import Contents
from mpbridge.training.checkpoint.store import locate
from mpbridge.training.serving.convert import to_folder
from tests.training.serving import folders


def same(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    return before.keys() == after.keys() and all(
        before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in before
    )


@pytest.mark.parametrize(
    ("engine", "recipe"),
    [("mcore", "bf16_mixed"), ("fsdp2", "fp32_params_bf16_compute"), ("megatron_fsdp", "bf16_mixed")],
    ids=["mcore", "fsdp2", "megatron_fsdp"],
)
def test_every_engine_reads_the_weights(layer: None, tmp_path: Path, engine: str, recipe: str) -> None:
    from mpbridge.backend.engines.registry import build_engine

    given = folders.llama_tensors()
    half = dict(list(given.items())[:9])
    place = folders.write(tmp_path / "hf", folders.LLAMA, half, {k: v for k, v in given.items() if k not in half})
    taken = folders.convert(place, tmp_path / "checkpoint")
    built = build_engine(folders.run_of(place, f"engine={engine}", f"mixed_precision={recipe}", "optimizer.lr=1e-3"))
    try:
        folders.load(built, taken.path)
        found = {name: getattr(p, "_local_tensor", p).detach().clone() for name, p in built.named_parameters()}
    finally:
        built.close()
    layer_1 = {name.removeprefix("model.layers.1."): tensor for name, tensor in given.items()}
    fc1 = torch.cat([layer_1["mlp.gate_proj.weight"], layer_1["mlp.up_proj.weight"]])
    q, k, v = (layer_1[f"self_attn.{name}_proj.weight"] for name in "qkv")
    # two query groups of two heads of 16 rows, each followed by its key and its value
    qkv = torch.cat([q[:32], k[:16], v[:16], q[32:], k[16:], v[16:]])
    for name, wanted in (("mlp.linear_fc1.weight", fc1), ("self_attention.linear_qkv.weight", qkv)):
        assert torch.equal(found[f"decoder.layers.1.{name}"].view(wanted.shape).to(wanted.dtype), wanted)
    assert torch.equal(found["output_layer.weight"].view(128, 64).bfloat16(), given["lm_head.weight"])


def test_a_tied_embedding_may_stand_twice(tmp_path: Path) -> None:
    tied = folders.LLAMA | {"tie_word_embeddings": True}
    given = folders.llama_tensors(tied=True)
    twice = given | {"lm_head.weight": given["model.embed_tokens.weight"].clone()}
    for number, tensors in enumerate((given, twice)):
        place = folders.write(tmp_path / f"hf{number}", tied, tensors)
        taken = folders.convert(place, tmp_path / f"checkpoint{number}")
        to_folder(taken.path, tmp_path / f"back{number}")
        assert same(tensors, load_file(tmp_path / f"back{number}" / "model.safetensors"))
    other = given | {"lm_head.weight": given["model.embed_tokens.weight"] + 1}
    with pytest.raises(BadValue, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        folders.convert(folders.write(tmp_path / "other", tied, other), tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_norms_in_fp32_beside_weights_in_bf16_come_back_as_they_were(tmp_path: Path) -> None:
    given = folders.llama_tensors()
    given["model.layers.0.input_layernorm.weight"] = torch.randn(64)  # the other layer's stays BF16
    taken = folders.convert(folders.write(tmp_path / "hf", folders.LLAMA, given), tmp_path / "checkpoint")
    to_folder(taken.path, tmp_path / "back")
    assert same(given, load_file(tmp_path / "back" / "model.safetensors"))


def test_fp8_in_blocks_is_widened_to_its_values(tmp_path: Path) -> None:
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 48], "activation_scheme": "dynamic"}
    config = folders.LLAMA | {"quantization_config": blocks}
    given, name = folders.llama_tensors(), "model.layers.0.mlp.down_proj.weight"
    codes = (torch.randn(64, 96) * 100).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2) * 1e-3
    given |= {name: codes, f"{name}_scale_inv": scales}
    taken = folders.convert(folders.write(tmp_path / "hf", config, given), tmp_path / "checkpoint")
    given_back = to_folder(taken.path, tmp_path / "back")
    found = load_file(tmp_path / "back" / "model.safetensors")[name]
    wanted = torch.empty(64, 96, dtype=torch.float64)
    for row in range(64):
        for column in range(96):
            wanted[row, column] = codes[row, column].double() * scales[row // 32, column // 48].double()
    # the exact product has 28 bits at most, FP32 keeps 24 of them, BF16 eight
    assert torch.equal(found, wanted.float().bfloat16())
    assert (taken.widened, taken.rounded) == (1, int((wanted.float().bfloat16().float() != wanted.float()).sum()))
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert "no longer FP8" in given_back.notes[0]


def test_layers_for_further_tokens_and_their_copies_come_back(tmp_path: Path) -> None:
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128, "max_position_embeddings": 64, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "n_routed_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 0,
        "n_shared_experts": 1, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    attention = {
        "q_a_proj": (24, 64), "q_b_proj": (96, 24), "kv_a_proj_with_mqa": (24, 64), "kv_b_proj": (128, 16),
        "o_proj": (64, 64),
    }  # fmt: skip
    sizes: dict[str, tuple[int, ...]] = {f"self_attn.{name}.weight": size for name, size in attention.items()}
    sizes |= {"self_attn.q_a_layernorm.weight": (24,), "self_attn.kv_a_layernorm.weight": (16,)}
    sizes |= {"mlp.gate.weight": (2, 64), "input_layernorm.weight": (64,), "post_attention_layernorm.weight": (64,)}
    for part in ("experts.0", "experts.1", "shared_experts"):
        sizes |= {f"mlp.{part}.{n}_proj.weight": (64, 32) if n == "down" else (32, 64) for n in ("gate", "up", "down")}
    tensors = {}
    for layer in (0, 1):
        tensors |= {f"model.layers.{layer}.{n}": torch.randn(size).bfloat16() for n, size in sizes.items()}
        tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = torch.randn(2)
    embedding, head = torch.randn(128, 64).bfloat16(), torch.randn(128, 64).bfloat16()
    tensors |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    tensors["model.norm.weight"] = torch.randn(64).bfloat16()
    ahead = {
        "enorm.weight": (64,), "hnorm.weight": (64,), "eh_proj.weight": (64, 128), "shared_head.norm.weight": (64,),
    }  # fmt: skip
    tensors |= {f"model.layers.1.{name}": torch.randn(size).bfloat16() for name, size in ahead.items()}
    again = {"embed_tokens.weight": embedding, "shared_head.head.weight": head}
    tensors |= {f"model.layers.1.{name}": tensor.clone() for name, tensor in again.items()}
    taken = folders.convert(folders.write(tmp_path / "hf", config, tensors), tmp_path / "checkpoint")
    to_folder(taken.path, tmp_path / "back")
    assert same(tensors, load_file(tmp_path / "back" / "model.safetensors"))
    # without the layer's weights the model has none
    less = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.1.")}
    assert folders.run_of(folders.write(tmp_path / "less", config, less)).facts.shape.mtp_layers == 0


def test_a_hybrids_weights_come_back_and_are_stored_in_megatron_cores_parts(tmp_path: Path) -> None:
    config = {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"], "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 64, "mamba_num_heads": 8, "mamba_head_dim": 12, "ssm_state_size": 16, "n_groups": 2, "n_routed_experts": 2,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48, "moe_latent_size": 24,
    }  # fmt: skip
    sizes: dict[str, tuple[int, ...]] = {
        # 96 channels, and 32 of B and of C
        "0.mixer.in_proj.weight": (2 * 96 + 2 * 32 + 8, 64), "0.mixer.conv1d.weight": (96 + 2 * 32, 1, 4), "0.mixer.conv1d.bias": (96 + 2 * 32,),
        "0.mixer.norm.weight": (96,), "0.mixer.out_proj.weight": (64, 96), **{f"0.mixer.{name}": (8,) for name in ("A_log", "D", "dt_bias")},
        "1.mixer.up_proj.weight": (96, 64), "1.mixer.down_proj.weight": (64, 96), "2.mixer.q_proj.weight": (64, 64),
        "2.mixer.k_proj.weight": (32, 64), "2.mixer.v_proj.weight": (32, 64), "2.mixer.o_proj.weight": (64, 64), "3.mixer.gate.weight": (2, 64),
        "3.mixer.fc1_latent_proj.weight": (24, 64), "3.mixer.fc2_latent_proj.weight": (64, 24), "3.mixer.shared_experts.up_proj.weight": (48, 64),
        "3.mixer.shared_experts.down_proj.weight": (64, 48), **{f"3.mixer.experts.{n}.up_proj.weight": (32, 24) for n in (0, 1)},
        **{f"3.mixer.experts.{n}.down_proj.weight": (24, 32) for n in (0, 1)}, **{f"{n}.norm.weight": (64,) for n in range(4)},
    }  # fmt: skip
    given = {f"backbone.layers.{name}": torch.randn(size).bfloat16() for name, size in sizes.items()}
    given["backbone.layers.3.mixer.gate.e_score_correction_bias"] = torch.randn(2)
    given |= {name: torch.randn(128, 64).bfloat16() for name in ("backbone.embeddings.weight", "lm_head.weight")}
    given["backbone.norm_f.weight"] = torch.randn(64).bfloat16()
    given["backbone.layers.0.mixer.A_log"] = torch.randn(8)  # kept in FP32
    taken = folders.convert(folders.write(tmp_path / "hf", config, given), tmp_path / "checkpoint")
    with Contents(taken.path) as contents:
        stored = {name: one.shape for name, one in contents.index.tensors.items() if "layers.0.mixer.in_proj" in name}
    rows = {name.rpartition(".")[2]: shape[0] for name, shape in stored.items() if "layer_norm" not in name}
    assert rows == {"z": 96, "x": 96, "B": 32, "C": 32, "dt": 8}
    to_folder(taken.path, tmp_path / "back")
    assert same(given, load_file(tmp_path / "back" / "model.safetensors"))
    low = ["--quantization", "compressed-tensors", "--recipe", "bf16_with_fp8_current_scaling_mixed"]
    assert main(["convert", f"ckpt:{taken.path}", f"hf:{tmp_path / 'low'}", *low]) == 0
    kept = json.loads((tmp_path / "low" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", "backbone.layers.3.mixer.gate"} <= set(kept)
    assert not [name for name in kept if name.endswith(("embeddings", "conv1d", "norm"))]
    assert main(["contract", str(tmp_path / "low"), "--engine", "vllm"]) == 0


def change(name: str, tensor: torch.Tensor | None) -> Any:
    given = folders.llama_tensors()
    return {k: v for k, v in (given | {name: tensor}).items() if v is not None}


WRONG = {
    "missing": (change("model.layers.1.mlp.up_proj.weight", None), "missing: model.layers.1.mlp.up_proj.weight"),
    "another shape": (change("model.norm.weight", torch.zeros(32)), "model.norm.weight is [32], expected [64]"),
    "a stranger": (change("model.layers.2.mlp.up_proj.weight", torch.zeros(2)), "not part of the model that config.json describes: model.layers.2."),
    "whole numbers": (change("model.norm.weight", torch.zeros(64, dtype=torch.int32)), "model.norm.weight is I32, expected one of F64"),
    "FP8 without scales": (change("lm_head.weight", torch.zeros(128, 64).to(torch.float8_e4m3fn)), "lm_head.weight_scale_inv is missing"),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "said"), WRONG.values(), ids=WRONG)
def test_weights_of_another_model_are_refused_before_anything_is_written(
    tmp_path: Path, tensors: Any, said: str
) -> None:
    place = folders.write(tmp_path / "hf", folders.LLAMA, tensors)
    with pytest.raises(Contradiction) as refused:
        folders.convert(place, tmp_path / "checkpoint")
    assert said in str(refused.value)
    assert not (tmp_path / "checkpoint").exists()


def test_a_folder_of_checkpoints_is_not_written_over(tmp_path: Path) -> None:
    place = folders.write(tmp_path / "hf", folders.LLAMA, folders.llama_tensors())
    taken = folders.convert(place, tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="already contains step_00000000"):
        folders.convert(place, tmp_path / "checkpoint")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        folders.convert(place, tmp_path / "file" / "checkpoint")
    for target in (tmp_path / "hf", tmp_path / "file"):
        with pytest.raises(BadValue, match="already exists"):
            to_folder(taken.path, target)


def test_training_goes_on_from_a_folder_and_its_result_is_one_again(tmp_path: Path, cli) -> None:
    given = folders.llama_tensors()
    (tmp_path / "text.txt").write_text("a corpus of bytes\n" * 2000)
    rows = {name: torch.randn(384, 64).bfloat16() * 0.05 for name in ("model.embed_tokens.weight", "lm_head.weight")}
    place = folders.write(tmp_path / "hf", folders.LLAMA | {"vocab_size": 384}, given | rows)
    (place / "generation_config.json").write_text("{}")
    assert "main weights are initialized from bf16" in cli("convert", f"hf:{place}", f"ckpt:{tmp_path / 'begin'}")
    train = [
        "train", "--config", f"hf:{place}", f"checkpoint.load={tmp_path / 'begin'}", f"checkpoint.save={tmp_path / 'run'}", "train.train_iters=2",
        "optimizer.lr=1e-3", f"data.corpus={tmp_path / 'text.txt'}", f"data.cache_dir={tmp_path / 'cache'}", "train.global_batch_size=2",
        "train.micro_batch_size=2", "train.eval_iters=1", "data.seq_length=32",
    ]  # fmt: skip
    assert "contains only weights" in cli(*train, code=1, error="beside")  # these are taken when that is asked for
    out = cli(*train, "checkpoint.reset_optimizer=true")
    assert "the FP32 main weights are initialized from bf16: they start from exactly those values" in out
    cli("convert", f"ckpt:{tmp_path / 'run'}", f"hf:{tmp_path / 'end'}", "--like", f"hf:{place}")
    assert (tmp_path / "end" / "generation_config.json").is_file()
    after = load_file(tmp_path / "end" / "model.safetensors")
    before = load_file(place / "model.safetensors")
    assert {name: t.shape for name, t in after.items()} == {name: t.shape for name, t in before.items()}
    moved = (after["model.layers.0.mlp.up_proj.weight"] - before["model.layers.0.mlp.up_proj.weight"]).abs().max()
    assert 0 < moved <= 3e-3  # two steps of Adam at 1e-3
    # without a pattern config.json comes from the run; main weights are in FP32, and the weights are those, rounded
    cli("convert", f"ckpt:{tmp_path / 'run'}", f"hf:{tmp_path / 'wide'}", "--dtype", "fp32")
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    assert all(torch.equal(wide[name].bfloat16(), tensor) for name, tensor in after.items())
    assert any(not torch.equal(wide[name], tensor.float()) for name, tensor in after.items())
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["torch_dtype"] == "float32"


def test_weights_alone_are_not_resumed_as_a_run(tmp_path: Path) -> None:
    place = folders.write(tmp_path / "hf", folders.LLAMA, folders.llama_tensors())
    taken = folders.convert(place, tmp_path / "checkpoint")
    with Contents(locate(tmp_path / "checkpoint")) as contents:
        assert contents.step == 0
        assert contents.index.incomplete() == []
    assert taken.path == tmp_path / "checkpoint" / "step_00000000"


def test_words_that_name_no_conversion_are_refused(cli) -> None:
    for words in (["hf:a", "hf:b"], ["a", "ckpt:b"], ["ckpt:a", "b.yaml"]):
        assert "expected hf:DIR ckpt:DIR, ckpt:DIR hf:DIR, or hf:DIR FILE.yaml" in cli("convert", *words, code=2)
    for words in (["ckpt:a", "hf:."], ["ckpt:a", "hf:"], ["hf:a", "ckpt:"]):
        assert "the name of a" in cli("convert", *words, code=2)
    assert "weights are taken as stored" in cli("convert hf:a ckpt:b --dtype bf16", code=2)


def test_a_configuration_is_written_from_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = folders.write(tmp_path / "hf", folders.LLAMA, folders.llama_tensors())
    assert main(["convert", f"hf:{place}", str(tmp_path / "model.yaml")]) == 0
    written = ConfigContainer.load(tmp_path / "model.yaml").resolved(training=False)
    assert folders.run_of(place).facts.shape == written.facts.shape
