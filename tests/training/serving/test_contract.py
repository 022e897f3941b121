"""Public bugs of serving, planted in folders and streams: `contract` names each, and nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mpbridge.cli.main import main
from mpbridge.common.machines import machine
from mpbridge.settings.huggingface.served import FORMATS
from mpbridge.training.serving.differences import differences
from mpbridge.training.serving.folder import examine
from tests.training.serving import models

Held = dict[str, torch.Tensor]
L0 = "model.layers.0."


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.checkpoint(tmp_path_factory.mktemp("contracts"))


_FOLDERS: dict[tuple[str, str], tuple[Held, dict[str, Any]]] = {}


def served(path: Path, method: str, scaling: str) -> tuple[Held, dict[str, Any]]:
    """Tensors and config of a served folder."""
    if (method, scaling) not in _FOLDERS:
        folder = models.serve(path, path.parent.parent / f"{method}-{scaling}", method, models.RECIPES[scaling])
        config = json.loads((folder / "config.json").read_text())
        _FOLDERS[method, scaling] = load_file(folder / "model.safetensors"), config
    held, config = _FOLDERS[method, scaling]
    return {name: tensor.clone() for name, tensor in held.items()}, json.loads(json.dumps(config))


def ct(held: Held, weight: torch.Tensor, module: str) -> None:
    """NVFP4 of one linear by itself, in blocks of a row, with multiplications by reciprocals as training does."""
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    overall = 2688.0 / weight.abs().max()
    peaks = weight.view(weight.shape[0], -1, 16).abs().amax(-1)
    block = (peaks / 6 * overall).to(torch.float8_e4m3fn)
    scaled = weight.view(weight.shape[0], -1, 16) * (1 / (block.float() * (1 / overall))).clamp_max(3e38).unsqueeze(-1)
    near = (scaled.abs().clamp_max(6).unsqueeze(-1) - grid).abs()
    code = torch.where(near == near.amin(-1, keepdim=True), torch.arange(8) % 2 * 10 + torch.arange(8), 99).argmin(-1)
    code = (code + 8 * torch.signbit(scaled)).view(weight.shape[0], -1).to(torch.uint8)
    held[f"{module}.weight_packed"] = code[:, ::2] | code[:, 1::2] << 4
    held[f"{module}.weight_scale"] = block
    held[f"{module}.weight_global_scale"] = overall.reshape(1)


def original(name: str) -> torch.Tensor:
    return models.weights()[f"{name}.weight"].float()


# --- the bugs: (held, config) is changed in place -----------------------------------------------------------------------------------------
def one_dimensional(held: Held, config: Any) -> None:
    ct(held, original(f"{L0}mlp.down_proj"), f"{L0}mlp.down_proj")


def apart(held: Held, config: Any) -> None:
    for part in ("gate", "up"):
        module = f"{L0}mlp.{part}_proj"
        ct(held, original(module), module)


def divided(held: Held, config: Any) -> None:
    weight, name = original("model.layers.1.mlp.down_proj"), "model.layers.1.mlp.down_proj"
    scale = weight.abs().max() / 448
    held[f"{name}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
    held[f"{name}.weight_scale"] = scale.expand(256, 1).clone()


def in_bf16(held: Held, config: Any) -> None:
    weight, name = original("model.layers.1.mlp.down_proj").bfloat16(), "model.layers.1.mlp.down_proj"
    scale = (weight.abs().max().float() / 448).bfloat16()
    held[f"{name}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
    held[f"{name}.weight_scale"] = scale.expand(256, 1).clone()


def fp32_blocks(held: Held, config: Any) -> None:
    name = f"{L0}self_attn.o_proj"
    blocks = original(name).view(2, 128, 2, 128)
    scale = torch.full((2, 2), 448.0) / blocks.abs().amax((1, 3))
    held[f"{name}.weight"] = (blocks * scale[:, None, :, None]).view(256, 256).to(torch.float8_e4m3fn)
    held[f"{name}.weight_scale_inv"] = 1 / scale


def floor_rule(held: Held, config: Any) -> None:
    name = f"{L0}self_attn.o_proj"
    blocks = original(name).view(256, 8, 32)
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1))) - 8
    held[f"{name}.weight"] = (
        (blocks / torch.exp2(exponent).unsqueeze(-1)).clamp(-448, 448).view(256, 256).to(torch.float8_e4m3fn)
    )
    held[f"{name}.weight_scale"] = (exponent + 127).to(torch.uint8)


def rounded_up(held: Held, config: Any) -> None:
    for name in [name for name in held if name.endswith("weight_scale")]:
        held[name] = torch.exp2(torch.ceil(torch.log2(held[name])))


def multiplied(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Held, Any], None]:
    def plant(held: Held, config: Any) -> None:
        held[name] = change(held[name])

    return plant


def dropped(name: str) -> Callable[[Held, Any], None]:
    return lambda held, config: held.__delitem__(name)


def swapped(held: Held, config: Any) -> None:
    a, b = f"{L0}mlp.gate_proj.weight_scale", f"{L0}mlp.up_proj.weight_scale"
    held[a], held[b] = held[b], held[a]


def in_high_precision(held: Held, config: Any) -> None:
    name = f"{L0}mlp.down_proj.weight"
    del held[f"{name}_scale"]
    held[name] = models.weights()[name]


def quantized_head(held: Held, config: Any) -> None:
    weight = original("lm_head")
    blocks = weight.view(320, 8, 32)
    exponent = torch.ceil(torch.log2(blocks.abs().amax(-1) / 448)) + 127
    held["lm_head.weight"] = (blocks / torch.exp2(exponent - 127).unsqueeze(-1)).view(320, 256).to(torch.float8_e4m3fn)
    held["lm_head.weight_scale"] = exponent.to(torch.uint8)


def fp8_in_nvfp4(held: Held, config: Any) -> None:
    name = f"{L0}mlp.down_proj"
    held[f"{name}.weight"] = original(name).to(torch.float8_e4m3fn)


def listing(*entries: str, key: str = "ignore", drop: str = "") -> Callable[[Held, Any], None]:
    def plant(held: Held, config: Any) -> None:
        listed = config["quantization_config"][key]
        config["quantization_config"][key] = [name for name in listed if name != drop] + list(entries)

    return plant


CT, MO = "compressed-tensors", "modelopt"
BUGS: list[tuple[str, str, str, Callable[[Held, Any], None], str, str]] = [
    # (public thread, method, scaling, what is planted, where, what is said)
    ("vllm#46400 by division", CT, "tensorwise", divided, "layers.1.mlp.down_proj", "division by amax / 448"),
    ("vllm#46400 in BF16", CT, "tensorwise", in_bf16, "layers.1.mlp.down_proj", "scale and quotient computed in BF16"),
    ("vllm#46400 exponents", CT, "mxfp8", floor_rule, "layers.0.self_attn.o_proj", "floor rule of OCP MX"),
    ("prime-rl#3112", "fp8", "blockwise", fp32_blocks, "layers.0.self_attn.o_proj", "FP32 scales instead of powers of two"),
    ("NVFP4 in 1-D blocks", CT, "nvfp4", one_dimensional, "layers.0.mlp.down_proj", "1-D blocks of 16 instead of 16 x 16"),
    ("MO#1411, vllm#54974", CT, "nvfp4", apart, "layers.0.mlp.gate_proj", "second-level scales differ among fused linears"),
    ("vllm#45212, NaN", MO, "nvfp4", multiplied(f"{L0}mlp.up_proj.weight_scale_2", lambda t: t * float("nan")), "up_proj.weight_scale_2", "not finite"),
    ("vllm#54189, zero", CT, "tensorwise", multiplied("model.layers.1.mlp.up_proj.weight_scale", lambda t: t * 0), "up_proj.weight_scale", "has values of 0"),
    ("vllm#45212, missing", CT, "mxfp8", dropped(f"{L0}mlp.up_proj.weight_scale"), "up_proj.weight_scale", "is missing"),
    ("transformers#48371", CT, "nvfp4", dropped(f"{L0}mlp.down_proj.weight_global_scale"), "weight_global_scale", "is missing"),
    ("modular#6600", CT, "nvfp4", multiplied(f"{L0}mlp.down_proj.weight_global_scale", lambda t: 1 / t), "mlp.down_proj", "divisor and multiplier"),
    ("modular#6600 of ModelOpt", MO, "nvfp4", multiplied(f"{L0}mlp.down_proj.weight_scale_2", lambda t: 1 / t), "mlp.down_proj", "divisor and multiplier"),
    ("transformers#47030", CT, "tensorwise", rounded_up, "layers.1.", "rounded up to powers of two after the cast"),
    ("nibbles", MO, "nvfp4", multiplied(f"{L0}mlp.down_proj.weight", lambda t: t >> 4 | t << 4), "mlp.down_proj", "two codes of each byte are swapped"),
    ("scales interchanged", CT, "mxfp8", swapped, "layers.0.mlp.gate_proj", "scales of the fused linears are interchanged"),
    ("MO#2160", MO, "nvfp4", multiplied(f"{L0}mlp.down_proj.weight_scale", lambda t: t[:, : t.shape[1] // 2].contiguous()), "weight_scale", "is [256, 12], expected [256, 24]"),
    ("MO#868", MO, "nvfp4", fp8_in_nvfp4, "down_proj.weight", "is [256, 384], expected [256, 192]"),
    ("MB#1746", MO, "mxfp8", in_high_precision, "layers.0.mlp.down_proj", "is stored in high precision, and not listed"),
    ("vllm#45102, MO#2112", MO, "mxfp8", quantized_head, "lm_head", "is stored quantized, and listed"),
    ("MO#1858", MO, "mxfp8", listing(drop="lm_head"), "lm_head", "is stored in high precision, and not listed"),
    ("vllm#21669, #44628", "fp8", "blockwise", listing("o_proj", key="modules_to_not_convert"), "o_proj", "matches no module"),
    ("verl#7918", MO, "mxfp8", listing("model.layers.0.mlp.gate"), "mlp.gate_up_proj", "vllm keeps it in high precision (by the entry 'model.layers.0.mlp.gate')"),
    ("one shard listed", CT, "mxfp8", listing(f"{L0}self_attn.q_proj"), "self_attn.qkv_proj", "vllm refuses it: q_proj of it is listed, the rest is not"),
    ("other values", CT, "mxfp8", multiplied(f"{L0}input_layernorm.weight", lambda t: t + 1), "input_layernorm", "has other values than the run"),
    ("MO#2334", MO, "mxfp8", multiplied(f"{L0}mlp.experts.w13", lambda t: t), "experts.w13", "is not part of the run's model"),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=[bug[0].replace(" ", "-") for bug in BUGS])
def test_a_public_bug_is_named(bug: Any, path: Path, tmp_path: Path) -> None:
    _, method, scaling, plant, where, said = bug
    held, config = served(path, method, scaling)
    held |= {f"{L0}mlp.experts.w13": torch.zeros(2, 2)} if "MO#2334" in bug[0] else {}
    plant(held, config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(held, tmp_path / "model.safetensors")
    report = examine(tmp_path, path, recipe=models.RECIPES[scaling], engines=("vllm",))
    hits = [one for one in report.found if where in one.name and said in one.text]
    assert hits, report.found
    # what follows from it (other values, the list, a fused linear) stands beside it; nothing else does
    assert len(report.found) <= (7 if plant is rounded_up else 4), report.found


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name.replace(" ", "-"))
def test_what_convert_wrote_is_clean(row: Any, path: Path, tmp_path: Path) -> None:
    scaling = row.scalings[0]
    folder = models.serve(path, tmp_path / "out", row.method, models.RECIPES[scaling])
    for run in (None, path):
        report = examine(
            folder, run, recipe=models.RECIPES[scaling] if run else None, engines=row.engines, target=machine("b200")
        )
        assert report.found == []
        assert report.quantized == (7 if scaling == "tensorwise" else 21)


def test_a_stream_is_compared_in_any_order(path: Path) -> None:
    held, config = served(path, "fp8", "blockwise")
    stream = partial(differences, path, config=config["quantization_config"], recipe=models.RECIPES["blockwise"])
    turned = dict(reversed(held.items()))
    assert stream(stream=turned.items()) == []
    fp32_blocks(turned, config)
    del turned[f"{L0}mlp.up_proj.weight"]
    found = stream(stream=turned.items())
    assert [one.name for one in found] == [f"{L0}mlp.up_proj.weight", f"{L0}self_attn.o_proj"]
    assert found[1].text.startswith("97") or "% of codes and 100.00% of scales differ" in found[1].text


def test_powers_of_two_are_checked_against_the_gpu(path: Path, tmp_path: Path) -> None:
    held, config = served(path, CT, "blockwise")
    held[f"{L0}self_attn.o_proj.weight_scale"] *= 1.5
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(held, tmp_path / "model.safetensors")
    assert examine(tmp_path, target=machine("h100")).found == []
    (found,) = examine(tmp_path, target=machine("b200")).found
    assert "multiplies with powers of two" in found.text


def test_the_verb_exits_with_1_and_the_worst_first(path: Path, tmp_path: Path, capsys) -> None:
    folder = models.serve(path, tmp_path / "out", MO, models.RECIPES["mxfp8"])
    assert main(["contract", str(folder)]) == 0
    assert "nothing contradicts itself" in capsys.readouterr().out
    held = load_file(folder / "model.safetensors")
    held[f"{L0}mlp.down_proj.weight"].view(torch.uint8)[0, 0] ^= 1
    del held[f"{L0}mlp.up_proj.weight_scale"]
    save_file(held, folder / "model.safetensors")
    assert main(["contract", str(folder), "--run", str(path), "--recipe", models.RECIPES["mxfp8"]]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "up_proj.weight_scale" in lines[2]
    assert "no known rule gives these bytes" in "".join(lines)
    assert "is not what contract.json recorded" in "".join(lines)


# --- folders that cannot be believed ------------------------------------------------------------------------------------------------------
def header(size: int, data: bytes = b"", tail: bytes = b"") -> bytes:
    return size.to_bytes(8, "little") + data + tail


def entry(**given: Any) -> bytes:
    text = json.dumps({"a.weight": {"dtype": "F8_E4M3", "shape": [4, 4], "data_offsets": [0, 16], **given}}).encode()
    return header(len(text), text, bytes(16))


GOOD = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INDEX = "model.safetensors.index.json"
DAMAGED: list[tuple[str, dict[str, bytes | str | Any], str]] = [
    ("no weights", {"config.json": {}}, "has no weights"),
    ("no config", {"model.safetensors": entry()}, "config.json cannot be read"),
    ("empty shard", {"model.safetensors": b""}, "not a safetensors file, or is truncated"),
    ("truncated header", {"model.safetensors": header(500, b"{")}, "truncated"),
    ("huge header", {"model.safetensors": header(1 << 62)}, "truncated"),
    ("header is a list", {"model.safetensors": header(2, b"[]")}, "not a safetensors file"),
    ("offsets beyond the end", {"model.safetensors": entry(data_offsets=[0, 99], shape=[99])}, "does not fit the file"),
    ("negative offsets", {"model.safetensors": entry(data_offsets=[-16, 0])}, "does not fit the file"),
    ("shape of huge numbers", {"model.safetensors": entry(shape=[1 << 60, 1 << 60])}, "does not fit the file"),
    ("unknown dtype", {"model.safetensors": entry(dtype="F4")}, "does not fit the file"),
    ("pickles", {"pytorch_model.bin": b"x"}, "pickled weights"),
    ("code", {"config.json": {"auto_map": {"AutoModel": "x.Y"}}, "model.safetensors": entry()}, "names Python code"),
    ("config is a list", {"config.json": [], "model.safetensors": entry()}, "expected an object"),
    ("config is not JSON", {"config.json": b"{", "model.safetensors": entry()}, "is not JSON"),
    ("nested config", {"config.json": b"[" * 100_000, "model.safetensors": entry()}, "nested too deeply"),
    ("index climbs out", {INDEX: {"weight_map": {"a.weight": "../../x.safetensors"}}}, "in the same folder"),
    ("absolute index", {INDEX: {"weight_map": {"a.weight": "/etc/passwd.safetensors"}}}, "in the same folder"),
    ("index without map", {INDEX: {"weight_map": 3}}, "expected weight_map"),
    ("index names an absent tensor", {INDEX: {"weight_map": {"b": "s.safetensors"}}, "s.safetensors": entry()}, "does not contain"),
    ("index names an absent file", {INDEX: {"weight_map": {"b": "t.safetensors"}}}, "cannot be read"),
    ("quantization is a list", {"config.json": {"quantization_config": [1]}, "model.safetensors": entry()}, "expected an object, got list"),
    ("unknown method", {"config.json": {"quantization_config": {"quant_method": "awq"}}, "model.safetensors": entry()}, "quantization_config says awq"),
    ("two groups", {"config.json": {"quantization_config": {"quant_method": CT, "config_groups": {"a": 1, "b": 2}}}, "model.safetensors": entry()}, "expected one of"),
    ("other blocks", {"config.json": {"quantization_config": {**GOOD, "weight_block_size": [64, {}]}}, "model.safetensors": entry()}, "expected one of"),
    ("ModelOpt's file is a number", {"hf_quant_config.json": 3, "model.safetensors": entry()}, "expected an object with 'quantization'"),
    ("contract of another schema", {"contract.json": {"schema": 9, "tensors": {}}, "model.safetensors": entry()}, "expected a contract of schema 1"),
    ("contract without hashes", {"contract.json": {"schema": 1, "tensors": {"a": 1}}, "model.safetensors": entry()}, "expected a contract"),
    ("contract is not JSON", {"contract.json": b"\xff", "model.safetensors": entry()}, "is not JSON"),
    ("codes without scales", {"model.safetensors": entry()}, "a.weight_scale_inv"),
    ("codes without config", {"config.json": {}, "model.safetensors": entry()}, "is stored quantized, but"),
    ("evil pattern", {"config.json": {"quantization_config": {**GOOD, "modules_to_not_convert": ["re:(a+)+$"]}}, "model.safetensors": entry()}, "not a regular expression that"),
    ("broken pattern", {"config.json": {"quantization_config": {**GOOD, "modules_to_not_convert": ["re:("]}}, "model.safetensors": entry()}, "not a regular expression that"),
    ("entries that are numbers", {"config.json": {"quantization_config": {**GOOD, "modules_to_not_convert": [1]}}, "model.safetensors": entry()}, "entries that are not names"),
    ("control characters", {"model.safetensors": entry().replace(b"a.weight", b"a\\u001b.weight"[:8])}, ""),
]  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED, ids=[case[0].replace(" ", "-") for case in DAMAGED])
def test_a_damaged_or_foreign_folder_is_named(case: Any, tmp_path: Path, capsys) -> None:
    _, files, said = case
    folder = tmp_path / "folder"
    folder.mkdir()
    if case[0] != "no config":
        files = {"config.json": {"quantization_config": GOOD}, **files}
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert main(["contract", str(folder)]) in (1, 2)
    out = capsys.readouterr()
    assert said in out.out + out.err
    assert "Traceback" not in out.err
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_a_fifo_is_not_waited_for(tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "model.safetensors")
    assert main(["contract", str(tmp_path)]) == 2
    assert "it is a FIFO, expected a regular file" in capsys.readouterr().err
