"""Adapters of a run as peft's files, and merged into their base before and after its quantization: values worked out by hand, and peft itself."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mpbridge.cli.main import main
from mpbridge.training.checkpoint.reader import Contents
from mpbridge.training.checkpoint.store import locate
from mpbridge.training.serving.cast import TrainedWith
from tests.training.serving import folders

LORA = ("model.lora_rank=4", "model.lora_alpha=6")
FROZEN = "mixed_precision.frozen=['*']"
RECIPE = ("--recipe", "bf16_with_fp8_current_scaling_mixed")
FP8 = (*RECIPE, "emulate=true", "mixed_precision.first_last_layers_bf16=false")
SCALE = 6 / 4


def trained(tmp: Path, base: Path, *more: str) -> Path:
    """The checkpoint of a run of three steps with adapters beside that base."""
    (tmp / "text.txt").write_text("a corpus of bytes\n" * 500)
    assert main(["convert", f"hf:{base}", f"ckpt:{tmp / 'begin'}"]) == 0
    train = [
        "train", "--config", f"hf:{base}", f"checkpoint.load={tmp / 'begin'}", f"checkpoint.save={tmp / 'run'}", "train.train_iters=3",
        "optimizer.lr=2e-2", "optimizer.min_lr=1e-2", f"data.corpus={tmp / 'text.txt'}", f"data.cache_dir={tmp / 'cache'}", "train.global_batch_size=2",
        "train.micro_batch_size=2", "train.eval_iters=0", "data.seq_length=32", "checkpoint.reset_optimizer=true", *more,
    ]  # fmt: skip
    assert main(train) == 0
    return tmp / "run"


def llama(tmp: Path) -> Path:
    given = folders.llama_tensors()
    more = {name: torch.randn(384, 64).bfloat16() * 0.05 for name in ("model.embed_tokens.weight", "lm_head.weight")}
    return folders.write(tmp / "hf", folders.LLAMA | {"vocab_size": 384}, given | more)


def export(run: Path, target: Path, *options: str) -> int:
    return main(["convert", f"ckpt:{run}", f"hf:{target}", *options])


def stored(run: Path) -> dict[str, torch.Tensor]:
    """Linear -> A [layers, rank, columns] and B [layers, rows, rank], read from the checkpoint's files by its index."""
    with Contents(locate(run)) as contents:
        found = {}
        for key, one in contents.index.tensors.items():
            if ".adapter." in key and not key.startswith("optimizer"):
                (piece, *others) = one.pieces
                whole = torch.empty(one.shape, dtype=getattr(torch, one.dtype))
                for part in (piece, *others):
                    at = tuple(slice(a, a + n) for a, n in zip(part.offset, part.shape, strict=True))
                    width = whole.element_size()
                    raw = bytearray(
                        (locate(run) / part.file).read_bytes()[part.at : part.at + whole[at].numel() * width]
                    )
                    whole[at] = torch.frombuffer(raw, dtype=whole.dtype).view(part.shape)
                found[key.removeprefix("decoder.layers.")] = whole
    return found


def changes(run: Path) -> dict[str, torch.Tensor]:
    """Module of the folder -> what its adapter adds to the weight, fp64. Two query groups of two heads of 16 rows, each followed by key and value."""
    held, found = stored(run), {}
    rows = {
        "self_attn.q_proj": ("self_attention.linear_qkv", [*range(32), *range(64, 96)]),
        "self_attn.k_proj": ("self_attention.linear_qkv", [*range(32, 48), *range(96, 112)]),
        "self_attn.v_proj": ("self_attention.linear_qkv", [*range(48, 64), *range(112, 128)]),
        "self_attn.o_proj": ("self_attention.linear_proj", [*range(64)]),
        "mlp.gate_proj": ("mlp.linear_fc1", [*range(96)]),
        "mlp.up_proj": ("mlp.linear_fc1", [*range(96, 192)]),
        "mlp.down_proj": ("mlp.linear_fc2", [*range(64)]),
    }
    for layer in (0, 1):
        for name, (linear, its) in rows.items():
            inner, out = (held[f"{linear}.adapter.linear_{end}.weight"][layer].double() for end in ("in", "out"))
            found[f"model.layers.{layer}.{name}"] = SCALE * out[its] @ inner
    return found


def test_parts_of_a_fused_linear_share_a_and_have_their_own_rows_of_b(tmp_path: Path) -> None:
    base = llama(tmp_path)
    run = trained(tmp_path, base, *LORA, FROZEN, "mixed_precision.lora_dtype=fp32")
    assert export(run, tmp_path / "alone", "--adapters", "alone", "--like", f"hf:{base}") == 0
    config = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 6, str(base))
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    held = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    wanted = changes(run)
    assert len(held) == 2 * len(wanted)
    for name, change in wanted.items():
        a, b = (held[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
        assert change.abs().max() > 1e-4
        assert a.dtype == b.dtype == torch.float32
        assert torch.equal(SCALE * b.double() @ a.double(), change)
    assert export(run, tmp_path / "merged", "--adapters", "merged", "--dtype", "fp32") == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "merged"))
    for name, tensor in before.items():
        exact = tensor.double() + wanted.get(name.removesuffix(".weight"), 0.0)
        assert (after[name].double() - exact).abs().max() <= 1e-6


def test_merging_before_and_after_quantization_are_named_and_their_errors_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = llama(tmp_path)
    run = trained(tmp_path, base, *FP8, *LORA, FROZEN)
    for choice in ("merged-before", "merged-after"):
        capsys.readouterr()
        assert export(run, tmp_path / choice, "--adapters", choice, "--json") == 0
        said = json.loads(capsys.readouterr().out)["merged"]
        given, found, change = (
            load_file(base / "model.safetensors"), load_file(tmp_path / choice / "model.safetensors"), changes(run),
        )  # fmt: skip
        squares = torch.zeros(3, dtype=torch.float64)
        for layer in (0, 1):
            for fused in ("qkv", ("gate", "up"), "o", ("down",)):
                block = "self_attn" if isinstance(fused, str) else "mlp"
                names = [f"model.layers.{layer}.{block}.{one}_proj" for one in fused]
                peak = max(float(given[f"{name}.weight"].abs().max()) for name in names)  # of the fused tensor
                scale = torch.tensor(448 / peak, dtype=torch.float32)
                for name in names:
                    high = given[f"{name}.weight"].float()
                    low = ((high * scale).to(torch.float8_e4m3fn).float() / scale).double()
                    exact = (high.double() if choice == "merged-before" else low) + change[name]
                    got = found[f"{name}.weight"]
                    assert (got.double() - exact).abs().max() <= 2.0**-8 * exact.abs().max()
                    computed = low + change[name]
                    squares += torch.stack([one.square().sum() for one in (got - computed, computed, change[name])])
        assert said["choice"] == choice
        assert said["linears"] == 8
        assert said["error"] == pytest.approx(float((squares[0] / squares[1]).sqrt()), rel=1e-3)
        assert said["of_change"] == pytest.approx(float((squares[0] / squares[2]).sqrt()), rel=1e-3)
        least, most = (1e-2, 4e-2) if choice == "merged-before" else (1e-3, 3e-3)
        assert least < said["error"] < most  # E4M3 keeps 3 bits of a value, BF16 7
    assert export(run, tmp_path / "served", "--adapters", "merged-after", "--quantization", "compressed-tensors") == 0
    assert "merged after quantization: the weights written differ" in capsys.readouterr().out
    contract = json.loads((tmp_path / "served" / "contract.json").read_text())
    assert contract["requantized"] is True
    assert contract["merged"]["choice"] == "merged-after"
    assert {one["source"] for one in contract["modules"].values()} == {"parameter with adapter"}
    assert main(["contract", str(tmp_path / "served")]) == 0
    assert "quantized anew after adapters were merged: these are not the codes that training" in capsys.readouterr().out
    served = load_file(tmp_path / "served" / "model.safetensors")
    assert served["model.layers.0.mlp.down_proj.weight"].dtype == torch.float8_e4m3fn

    # a base that was stored in FP8: the checkpoint has no other values, so those before quantization come from its folder
    of = TrainedWith.of
    monkeypatch.setattr(TrainedWith, "of", lambda *args: dataclasses.replace(of(*args), stores=True))
    assert export(run, tmp_path / "none", "--adapters", "merged-before") == 2
    assert "stored in a low format" in capsys.readouterr().err
    assert export(run, tmp_path / "taken", "--adapters", "merged-before", "--like", f"hf:{base}") == 0
    taken, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("taken", "merged-before"))
    assert all(torch.equal(taken[name], tensor) for name, tensor in wanted.items())
    # E4M3 rounds by up to 1/16: another base that is as near as that, and one with a single other row, are not this run's
    wrong, near = Path(shutil.copytree(base, tmp_path / "wrong")), "model.layers.1.mlp.down_proj.weight"
    for other in (given[near] * (1 + 0.04 * torch.randn_like(given[near])), torch.cat([given[near][:1] * 1.5, given[near][1:]])):  # fmt: skip
        save_file(given | {near: other.bfloat16()}, wrong / "model.safetensors", metadata={"format": "pt"})
        for choice in ("merged-before", "alone"):
            assert export(run, tmp_path / "never", "--adapters", choice, "--like", f"hf:{wrong}") == 2
            assert "not the base of this run" in capsys.readouterr().err
            assert not (tmp_path / "never").exists()
    assert export(run, tmp_path / "alone", "--adapters", "alone", "--like", f"hf:{base}") == 0
    (wrong / "model.safetensors").unlink()
    assert export(run, tmp_path / "named", "--adapters", "alone", "--like", f"hf:{wrong}") == 0
    assert "was not compared" in capsys.readouterr().out


def test_a_base_after_delayed_scaling_is_compared_by_half_a_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = llama(tmp_path)
    run = trained(tmp_path, base, *FP8, *LORA, FROZEN, "--recipe", "bf16_with_fp8_delayed_scaling_mixed")
    of = TrainedWith.of
    monkeypatch.setattr(TrainedWith, "of", lambda *args: dataclasses.replace(of(*args), stores=True))
    given, name = load_file(base / "model.safetensors"), "model.layers.1.mlp.down_proj.weight"
    for factor, code in ((1.0, 0), (1 + 1 / 20, 0), (1 + 1 / 12, 2)):
        folder = Path(shutil.copytree(base, tmp_path / f"by {factor:.2f}"))
        made = given | {name: (given[name].float() * factor).bfloat16()}
        save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
        assert export(run, tmp_path / f"out {factor:.2f}", "--adapters", "merged-before", "--like", f"hf:{folder}") == code  # fmt: skip


def test_what_an_export_would_leave_open_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = llama(tmp_path)
    run = trained(tmp_path, base, *FP8, *LORA, "mixed_precision.frozen=['decoder.*']")
    for options, said in {
        (): "the checkpoint has adapters of rank 4",
        ("--adapters", "merged"): "merged-before adds the adapters to its unquantized weights",
        ("--adapters", "alone"): "the base trained too (embedding.word_embeddings.weight and 1 more parameters)",
        ("--adapters", "alone", "--quantization", "fp8"): "adapters are in high precision",
    }.items():
        capsys.readouterr()
        assert export(run, tmp_path / "refused", *options) in (1, 2)
        assert said in capsys.readouterr().err
        assert not (tmp_path / "refused").exists()
    assert export(tmp_path / "begin", tmp_path / "refused", "--adapters", "alone") == 2
    assert "the checkpoint has none" in capsys.readouterr().err


HYBRID: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "mamba_num_heads": 16, "mamba_head_dim": 12, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16, "max_position_embeddings": 256,
    "layers_block_type": ["linear_attention", "mlp", "full_attention"], "time_step_min": 1e-30,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("Llama", {"vocab_size": 384}, ()),
    "nemotron_h": ("NemotronH", HYBRID, ("model.lora_targets=['mixer.in_proj','self_attention.*','mlp.*']",)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")  # transformers' and peft's own
def test_peft_loads_the_adapters_and_gives_the_logits_of_the_run(layer: None, tmp_path: Path, name: str) -> None:
    peft = pytest.importorskip("peft", reason="peft loads the adapters (pip install peft, beside the extra hf)")
    transformers = pytest.importorskip("transformers", reason="transformers makes the base (pip install -e '.[hf]')")
    from mpbridge.backend.engines.registry import build_engine
    from tests.training.serving.test_logits import written

    kind, settings, targets = MODELS[name]
    base = tmp_path / "hf"
    written(kind, settings, base)
    run = trained(tmp_path, base, "--recipe", "fp32", *LORA, FROZEN, *targets)
    assert export(run, tmp_path / "alone", "--adapters", "alone", "--like", f"hf:{base}") == 0
    assert export(run, tmp_path / "merged", "--adapters", "merged", "--like", f"hf:{base}") == 0
    tokens = torch.randint(0, 384, (2, 32), generator=torch.Generator().manual_seed(1))
    engine = build_engine(folders.run_of(base, "mixed_precision=fp32", "data.seq_length=32", *LORA, *targets))
    made = transformers.AutoModelForCausalLM.from_pretrained
    try:
        folders.load(engine, locate(run))
        engine.model[0].eval()
        with torch.no_grad():
            ours = engine.model[0](tokens, torch.arange(32).expand(2, 32), None)
            plain = made(base, attn_implementation="eager").eval()(tokens).logits
            model = peft.PeftModel.from_pretrained(made(base, attn_implementation="eager"), tmp_path / "alone")
            theirs = model.eval()(tokens).logits
            merged = made(tmp_path / "merged", attn_implementation="eager").eval()(tokens).logits
    finally:
        engine.close()
    largest = ours.abs().max()
    assert (plain - ours).abs().max() > 1e-2 * largest
    # another order of sums: a few units in the last place of FP32
    assert (theirs - ours).abs().max() <= 5e-6 * largest
    assert (merged - ours).abs().max() <= 5e-6 * largest
