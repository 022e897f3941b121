"""`contract` on folders and streams: public bugs that are planted, folders that are damaged, and what convert wrote."""

from __future__ import annotations

import json
import math
import os
import struct
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mpbridge.cli.main import main
from mpbridge.common.errors import BadValue
from mpbridge.common.machines import machine
from mpbridge.settings.huggingface.served import FORMATS
from mpbridge.training.serving.differences import differences
from mpbridge.training.serving.folder import examine
from tests.training.serving import models
from tests.training.serving.bugs import BUGS, CT, L0, MO, Bug, Held, fp32_blocks, nothing
from tests.training.serving.models import put, served


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contracts")


@pytest.fixture(scope="module")
def path(root: Path) -> Path:
    return models.checkpoints(root, "llama")


def unserved(path: Path, recipe: str) -> tuple[Held, dict[str, Any]]:
    """The folder of another tool in a format that convert refuses: each linear in blocks of 128 x 128 by itself."""
    with pytest.raises(BadValue, match="heads of 64 rows"):
        models.serve(path, path.parent / "refused", "fp8", recipe)
    plain = path.parent.parent / "bf16"
    held, config = load_file(plain / "model.safetensors"), json.loads((plain / "config.json").read_text())
    for name in [name for name in held if "proj" in name]:
        rows, columns = held[name].shape
        held[f"{name}_scale_inv"] = torch.full((-(-rows // 128), -(-columns // 128)), 2.0**-8)
        held[name] = (held[name].float() * 256).clamp(-448, 448).to(torch.float8_e4m3fn)
    listed = {"modules_to_not_convert": ["lm_head"], "scale_fmt": "ue8m0"}
    return held, config | {"quantization_config": {**GOOD, **listed}}


@pytest.mark.parametrize(
    "bug", BUGS, ids=lambda bug: f"{bug.threads.partition(',')[0]} {bug.planted}".strip().replace(" ", "-")
)
def test_a_public_bug_is_named(bug: Bug, root: Path, tmp_path: Path) -> None:
    path, recipe = models.checkpoints(root, bug.model), models.recipe_of(root, bug.scaling)
    held, config = served(path, bug.method, recipe) if bug.plant is not nothing else unserved(path, recipe)
    bug.plant(held, config)
    put(tmp_path, held, config)
    target = None if bug.target is None else machine(bug.target)
    report = examine(tmp_path, path, recipe=recipe, engines=("vllm",), target=target)
    hits = [one for one in report.found if bug.where in one.name and bug.said in one.text]
    assert hits, report.found
    # what follows from it (other values, the list, a fused linear) stands beside it; nothing else does
    assert len({one.text.partition("differ: ")[2] or one.text for one in report.found}) <= 4, report.found


def test_every_public_thread_is_a_row() -> None:
    threads = {thread for bug in BUGS for thread in bug.threads.split(", ") if thread}
    assert len(threads) == 37


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
    held, config = served(path, "fp8", models.RECIPES["blockwise"])
    stream = partial(differences, path, config=config["quantization_config"], recipe=models.RECIPES["blockwise"])
    turned = dict(reversed(held.items()))
    assert stream(stream=turned.items()) == []
    fp32_blocks(turned, config)
    del turned[f"{L0}mlp.up_proj.weight"]
    found = stream(stream=turned.items())
    assert [one.name for one in found] == [f"{L0}mlp.up_proj.weight", f"{L0}self_attn.o_proj"]
    assert found[1].text.startswith("97") or "% of codes and 100.00% of scales differ" in found[1].text


def test_scales_of_activations_come_in_any_order_and_whole(path: Path, tmp_path: Path) -> None:
    held, config = served(path, MO, models.RECIPES["nvfp4"])
    recipe, quantization = models.RECIPES["nvfp4"], config["quantization_config"]
    modules = [name.removesuffix(".weight_scale_2") for name in held if name.endswith(".weight_scale_2")]
    held |= {f"{module}.input_scale": torch.tensor(0.5) for module in modules}
    for stream in (held, dict(reversed(held.items()))):
        assert differences(path, stream.items(), quantization, recipe=recipe) == []
    del held[f"{L0}mlp.up_proj.input_scale"]
    held[f"{L0}mlp.down_proj.input_scale"] = torch.tensor(0.0)
    put(tmp_path, held, config)
    for run in (None, path):
        found = examine(tmp_path, run, recipe=recipe if run else None).found
        assert [(one.name, one.kind) for one in found] == [
            (f"{L0}mlp.up_proj.input_scale", "missing"),
            (f"{L0}mlp.down_proj.input_scale", "invalid"),
        ]
    quantization["quant_algo"] = "NVFP4"  # which quantizes activations
    put(tmp_path, {name: held[name] for name in held if "input" not in name or "norm" in name}, config)
    assert len(examine(tmp_path).found) == len(modules)


def test_the_rule_of_activations_is_trainings(path: Path, tmp_path: Path) -> None:
    held, config = served(path, "fp8", models.RECIPES["blockwise"])
    quantization = config["quantization_config"]
    assert quantization.pop("scale_fmt") == "ue8m0"
    (one,) = differences(path, held.items(), quantization, recipe=models.RECIPES["blockwise"])
    assert (one.name, one.kind) == ("scale_fmt", "config")
    assert "is absent, expected ue8m0: an engine computes otherwise" in one.text
    put(tmp_path, held, config)
    assert examine(tmp_path, path, recipe=models.RECIPES["blockwise"]).found == [one]


@pytest.mark.parametrize("method", [CT, MO])
def test_another_tools_scales_of_whole_tensors_are_read(method: str, path: Path, tmp_path: Path) -> None:
    held, config = served(path, MO, models.RECIPES["tensorwise"])
    mine = {name: one for name, one in config["quantization_config"].items() if name == "ignore"}
    group = {"weights": {"strategy": "tensor", "dynamic": False}}
    group["input_activations"] = {"strategy": "tensor", "dynamic": True}
    theirs: dict[str, Any] = {"format": "float-quantized", "config_groups": {"group_0": group}}
    theirs = {"quant_algo": "FP8"} if method == MO else theirs
    config["quantization_config"] = {"quant_method": method, **theirs, **mine}
    for name in [name for name in held if name.endswith("weight_scale")]:
        held[name] = held[name][:1] if method == CT else held[name][0]
        if method == MO:
            held[name.replace("weight", "input")] = torch.tensor(1.0)
    put(tmp_path, held, config)
    assert examine(tmp_path, engines=("vllm",)).found == []
    found = examine(tmp_path, path, recipe=models.RECIPES["tensorwise"]).found
    said = f"trained in FP8 with current (tensorwise) scaling, served as {method} FP8 by tensor"
    assert {one.text for one in found} == {said}
    assert [one.error for one in found] == [0.0] * 7  # the same values under another name
    held["model.layers.1.mlp.up_proj.weight_scale"] *= 2
    save_file(held, tmp_path / "model.safetensors")
    (one,) = examine(tmp_path).found
    assert (one.name, one.kind, one.error) == ("model.layers.1.mlp.gate_proj", "group", 1.0)


def test_powers_of_two_are_checked_against_the_gpu(path: Path, tmp_path: Path) -> None:
    held, config = served(path, CT, models.RECIPES["blockwise"])
    held[f"{L0}self_attn.o_proj.weight_scale"] *= 1.5
    put(tmp_path, held, config)
    assert examine(tmp_path, target=machine("h100")).found == []
    (found,) = examine(tmp_path, target=machine("b200")).found
    assert "multiplies with powers of two" in found.text


def test_the_verb_exits_with_1_and_the_worst_first(path: Path, tmp_path: Path, cli) -> None:
    folder = models.serve(path, tmp_path / "out", MO, models.RECIPES["mxfp8"])
    assert "nothing contradicts itself" in cli("contract", folder)
    held = load_file(folder / "model.safetensors")
    save_file(held | {"model.new.weight": torch.zeros(2)}, folder / "model.safetensors")
    assert "is not in contract.json: added since" in cli("contract", folder, code=1)
    held[f"{L0}mlp.down_proj.weight"].view(torch.uint8)[0, 0] ^= 1
    del held[f"{L0}mlp.up_proj.weight_scale"]
    save_file(held, folder / "model.safetensors")
    lines = cli("contract", folder, "--run", path, "--recipe", models.RECIPES["mxfp8"], code=1).splitlines()
    assert "up_proj.weight_scale" in lines[2]
    assert "no known rule gives these bytes" in "".join(lines)
    assert "is not what contract.json recorded" in "".join(lines)


# --- folders that cannot be believed ------------------------------------------------------------------------------------------------------
def header(size: int, data: bytes = b"", tail: bytes = b"") -> bytes:
    return size.to_bytes(8, "little") + data + tail


def entry(**given: Any) -> bytes:
    text = json.dumps({"a.weight": {"dtype": "F8_E4M3", "shape": [4, 4], "data_offsets": [0, 16], **given}}).encode()
    return header(len(text), text, bytes(16))


def shard(*tensors: tuple[str, str, list[int]], data: bytes | None = None, at: int | None = None) -> bytes:
    """A shard of (name, dtype, shape). data: instead of zeros; at: where every tensor begins."""
    sizes = {"F8_E4M3": 1, "F8_E5M2": 1, "U8": 1, "F32": 4, "BF16": 2, "F64": 8}
    entries, end = {}, 0
    for name, dtype, shape in tensors:
        begin = end if at is None else at
        end = begin + sizes[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    return header(len(text), text, bytes(end) if data is None else data)


CODES = ("a.weight", "F8_E4M3", [4, 4])
SCALES = ("a.weight_scale_inv", "F32", [1, 1])
ONE = struct.pack("<f", 1.0)
MXFP8 = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}
BYTES = {"config.json": {"quantization_config": MXFP8}}
WIDE = ("a.weight", "F8_E4M3", [1, 32])


GOOD = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INDEX = "model.safetensors.index.json"
DAMAGED: list[tuple[str, dict[str, bytes | str | Any], str]] = [
    ("no weights", {"config.json": {}}, "has no weights"),
    ("no config", {"model.safetensors": entry()}, "no config.json in it"),
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
    ("truncated data", {"model.safetensors": shard(CODES, SCALES, data=bytes(16) + ONE[:2])}, "does not fit the file"),
    ("data too long", {"model.safetensors": shard(CODES, SCALES, data=bytes(16) + ONE + bytes(9))}, "cannot be read"),
    ("tensors over each other", {"model.safetensors": shard(CODES, SCALES, at=0, data=bytes(16))}, "cannot be read"),
    ("header of fractions", {"model.safetensors": entry(shape=[4.0, 4.0])}, "does not fit the file"),
    ("other codes", {"model.safetensors": shard(("a.weight", "F8_E5M2", [4, 4]), SCALES, data=bytes(16) + ONE)}, "is F8_E5M2, expected F8_E4M3"),
    ("scales in FP64", {"model.safetensors": shard(CODES, ("a.weight_scale_inv", "F64", [1, 1]))}, "is F64, expected F32"),
    ("scales of other blocks", {"model.safetensors": shard(CODES, ("a.weight_scale_inv", "F32", [4, 1]), data=bytes(16) + ONE * 4)}, "is [4, 1], expected [1, 1]"),
    ("scales of zero", {"model.safetensors": shard(CODES, SCALES)}, "has values of 0, expected positive ones"),
    ("scales below zero", {"model.safetensors": shard(CODES, SCALES, data=bytes(16) + struct.pack("<f", -1.0))}, "has values of -1, expected positive ones"),
    ("scales that are NaN", {"model.safetensors": shard(CODES, SCALES, data=bytes(16) + struct.pack("<f", math.nan))}, "not finite"),
    ("E8M0 bytes that are NaN", {**BYTES, "model.safetensors": shard(WIDE, ("a.weight_scale_inv", "U8", [1, 1]), data=bytes(32) + b"\xff")}, "has the byte 255, which is NaN"),
    ("E8M0 bytes as FP32", {**BYTES, "model.safetensors": shard(WIDE, ("a.weight_scale_inv", "F32", [1, 1]))}, "is F32, expected U8"),
    ("a tensor twice", {"a.safetensors": entry(), "b.safetensors": entry()}, "contains a.weight again"),
    ("two lists", {"hf_quant_config.json": {"quantization": {"exclude_modules": ["b"]}}, "config.json": {"quantization_config": {"quant_method": MO, "quant_algo": "MXFP8"}},
                   "model.safetensors": entry()}, "lists other modules in high precision than config.json"),
    ("index in a folder", {INDEX: {"weight_map": {"a.weight": "sub/x.safetensors"}}}, "in the same folder"),
    ("control characters", {"model.safetensors": shard(("\x1b[31m.weight", "F8_E4M3", [4, 4]))}, "weight_scale_inv"),
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
    assert "\x1b" not in out.out + out.err
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize(
    ("name", "to"), [("model.safetensors", "model.safetensors"), ("config.json", "/dev/zero"), (INDEX, ".")]
)
def test_links_that_lead_nowhere_are_named(name: str, to: str, tmp_path: Path, cli) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(entry())
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(to)
    err = cli("contract", tmp_path, code=1 if name == INDEX else 2)
    assert name == INDEX or name in err
    assert "Traceback" not in err


def test_a_fifo_is_not_waited_for(tmp_path: Path, cli) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "model.safetensors")
    assert "it is a FIFO, expected a regular file" in cli("contract", tmp_path, code=2)
