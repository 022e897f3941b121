"""What a served folder's config.json says beside its tensors: settings by which an engine computes something else than training, lists, dtypes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mpbridge.settings.huggingface.quantization import settings_of
from mpbridge.training.serving.convert import to_folder
from mpbridge.training.serving.folder import examine
from tests.training.serving import models
from tests.training.serving.bugs import CT, L0, MO
from tests.training.serving.models import put, served

CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
SETTINGS: list[tuple[str, str, str, Any, str]] = [
    ("compressed-tensors", "mxfp8", "kv_cache_scheme", CACHE, "key-value cache"),
    ("modelopt", "mxfp8", "kv_cache_quant_algo", "FP8", "key-value cache"),
    ("compressed-tensors", "mxfp8", "config_groups.group_0.input_activations", None, "input_activations"),
    ("compressed-tensors", "tensorwise", "config_groups.group_0.input_activations.strategy", "tensor", "input_activations.strategy"),
    ("compressed-tensors", "mxfp8", "config_groups.group_0.targets", ["re:.*mlp.*"], "targets"),
    ("compressed-tensors", "mxfp8", "config_groups.group_0.weights.group_size", 64, "group_size"),
    ("fp8", "blockwise", "activation_scheme", "static", "activation_scheme"),
    ("modelopt", "mxfp8", "../rope_theta", 5.0, "config.json"),
    ("modelopt", "mxfp8", "../rms_norm_eps", 0.1, "config.json"),
    ("modelopt", "mxfp8", "../torch_dtype", "float16", "config.json"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "scaling", "key", "value", "name"), SETTINGS, ids=[one[2] for one in SETTINGS])
def test_a_setting_by_which_an_engine_computes_something_else_is_named(
    method: str, scaling: str, key: str, value: Any, name: str, path: Path, tmp_path: Path
) -> None:
    held, config = served(path, method, models.RECIPES[scaling])
    *above, last = key.removeprefix("../").split(".")
    inner = config if key.startswith("../") else config["quantization_config"]
    for word in above:
        inner = inner[word]
    inner[last] = value
    put(tmp_path, held, config)
    found = [one for one in examine(tmp_path, path, recipe=models.RECIPES[scaling]).found if one.kind == "config"]
    assert [one.name for one in found] == [name]
    assert "an engine computes" in found[0].text or "config.json of llama says" in found[0].text


def test_what_llm_compressor_writes_beside_is_no_difference(path: Path, tmp_path: Path) -> None:
    """Defaults that compressed-tensors 0.20 dumps, and ModelOpt's groups, which engines do not read."""
    held, config = served(path, CT, models.RECIPES["tensorwise"])
    group = config["quantization_config"]["config_groups"]["group_0"]
    for part in ("weights", "input_activations"):
        group[part] |= {
            "actorder": None,
            "block_structure": None,
            "group_size": None,
            "observer": "minmax",
            "observer_kwargs": {},
            "scale_dtype": None,
            "zp_dtype": None,
        }
    config["quantization_config"] |= {
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.0",
    }
    put(tmp_path, held, config)
    assert examine(tmp_path, path, recipe=models.RECIPES["tensorwise"]).found == []
    held, config = served(path, MO, models.RECIPES["nvfp4"])
    given = config["quantization_config"]
    size = given.pop("group_size")
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": size}
    given |= {
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "producer": {"name": "modelopt"},
    }
    put(tmp_path, held, config)
    assert examine(tmp_path, path, recipe=models.RECIPES["nvfp4"]).found == []


Change = Callable[[dict[str, Any], dict[str, Any]], object]
"""Of config.json, and of the parts of its group."""
FOREIGN: list[tuple[str, str, str, Change]] = [
    ("compressed-tensors before scale_dtype", CT, "nvfp4", lambda c, g: g["weights"].pop("scale_dtype")),
    ("for both operands", CT, "mxfp8", lambda c, g: [g[one].pop("scale_dtype") for one in ("weights", "input_activations")]),
    ("blocks in words", CT, "blockwise", lambda c, g: g["weights"].update(block_structure="128x128")),
    ("SGLang's scale_fmt", "mxfp8", "mxfp8", lambda c, g: c["quantization_config"].update(scale_fmt="ue8m0", fmt="e4m3")),
    ("ModelOpt's MXFP8", MO, "mxfp8", lambda c, g: c["quantization_config"].pop("group_size")),
    ("how a folder is loaded", CT, "mxfp8", lambda c, g: c["quantization_config"].update(run_compressed=True)),
    ("a kernel", "fp8", "blockwise", lambda c, g: c["quantization_config"].update(use_deep_gemm=True)),
    ("no dtype", CT, "mxfp8", lambda c, g: c.update(torch_dtype=None)),
    ("the dtype of the weights", CT, "mxfp8", lambda c, g: c.update(torch_dtype="auto")),
    ("torch's name", CT, "mxfp8", lambda c, g: c.update(torch_dtype="torch.bfloat16")),
    ("dtypes by module", CT, "mxfp8", lambda c, g: c.update(dtype={"": "bfloat16"})),
]  # fmt: skip


@pytest.mark.parametrize(("method", "scaling", "change"), [one[1:] for one in FOREIGN], ids=[one[0] for one in FOREIGN])
def test_what_other_tools_write_is_no_difference(
    method: str, scaling: str, change: Change, path: Path, tmp_path: Path
) -> None:
    held, config = served(path, method, models.RECIPES[scaling])
    change(config, config["quantization_config"].get("config_groups", {}).get("group_0", {}))
    put(tmp_path, held, config)
    if method == MO:  # whose own file has the size for every format
        own = {"quant_algo": "MXFP8", "group_size": 32, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    assert examine(tmp_path).found == []
    assert examine(tmp_path, path, recipe=models.RECIPES[scaling]).found == []


def test_a_folder_written_wider_is_the_runs(path: Path, tmp_path: Path) -> None:
    to_folder(path, tmp_path / "out", dtype="float32")
    assert examine(tmp_path / "out", path).found == []


def test_an_integer_cache_is_not_called_fp8() -> None:
    for kind, said in (("float", "FP8"), ("int", {"num_bits": 8, "type": "int"})):
        assert settings_of({"kv_cache_scheme": {"num_bits": 8, "type": kind}})["key-value cache"] == said


def test_a_config_without_model_type_is_said_to_have_none(path: Path, tmp_path: Path) -> None:
    held, config = served(path, CT, models.RECIPES["mxfp8"])
    put(tmp_path, held, {"quantization_config": config["quantization_config"]})
    (one,) = examine(tmp_path, path, recipe=models.RECIPES["mxfp8"]).found
    assert one.text.startswith("model_type is missing: expected one of llama, ")


@pytest.mark.parametrize(("name", "value"), [("quant_algo", "FP8"), ("kv_cache_quant_algo", "FP8"), ("group_size", 16)])
def test_modelopts_own_file_that_says_otherwise_is_named(name: str, value: Any, path: Path, tmp_path: Path) -> None:
    folder = models.serve(path, tmp_path / "out", MO, models.RECIPES["mxfp8"])
    legacy = json.loads((folder / "hf_quant_config.json").read_text())
    legacy["quantization"][name] = value
    (folder / "hf_quant_config.json").write_text(json.dumps(legacy))
    (one,) = examine(folder).found
    assert (one.name, one.kind) == ("hf_quant_config.json", "config")
    assert f" {value}, and config.json" in one.text


def test_high_precision_in_another_dtype_is_the_runs_where_no_value_changes(path: Path, tmp_path: Path) -> None:
    held, config = served(path, CT, models.RECIPES["mxfp8"])
    recipe, name = models.RECIPES["mxfp8"], "model.embed_tokens.weight"
    given = models.weights()[name]
    lost = int((given.half().bfloat16() != given).sum())  # BF16 has numbers below the smallest of FP16
    for dtype, said in ((torch.float32, []), (torch.float16, [f"is stored as F16: {lost:,} values are rounded"])):
        put(tmp_path, held | {name: given.to(dtype)}, config)
        assert [one.text for one in examine(tmp_path, path, recipe=recipe).found] == said
    assert lost


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_a_list_under_its_other_name_is_seen(engine: str, path: Path, tmp_path: Path) -> None:
    """vLLM's Fp8Config: ignored_layers, and modules_to_not_convert only where that is empty."""
    held, config = served(path, "fp8", models.RECIPES["blockwise"])
    given = config["quantization_config"]
    given["ignored_layers"] = given.pop("modules_to_not_convert")
    put(tmp_path, held, config)
    assert examine(tmp_path, engines=(engine,)).found == []
    given["modules_to_not_convert"], given["ignored_layers"] = given["ignored_layers"], [f"{L0}self_attn.o_proj"]
    put(tmp_path, held, config)
    found = examine(tmp_path, engines=(engine,)).found
    two = "lists other modules than modules_to_not_convert: engines take it alone, or both: keep one list"
    assert ("ignored_layers", two) in {(one.name, one.text) for one in found}
    assert not any(engine in one.text for one in found)
