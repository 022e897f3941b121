"""Other programs read the served folders: compressed-tensors' and transformers' dequantizers get the values that the formats' definitions give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mpbridge.settings.huggingface.served import FORMATS
from tests.training.serving import models

SHARDS = "model.safetensors"
BESIDE = ["re:.*embed_tokens$", "re:.*norm$"]
"""compressed-tensors' dequantizer takes every tensor named weight for a linear's."""


def by_compressed_tensors(folder: Path) -> dict[str, torch.Tensor]:
    module = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.ct_dequantizer")
    made: Any = module.CompressedTensorsDequantizer(str(folder), ignore=BESIDE, dtype=torch.float32)
    return dict(made.process(load_file(folder / SHARDS)))


def by_block_dequantizer(folder: Path) -> dict[str, torch.Tensor]:
    module = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer")
    made: Any = module.FP8BlockDequantizer.from_pretrained(str(folder), dtype=torch.float32)
    return dict(made.process(load_file(folder / SHARDS)))


def by_transformers(folder: Path) -> dict[str, torch.Tensor]:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    pytest.importorskip("accelerate")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return dict(loaded.state_dict())


CASES = [
    ("fp8", "blockwise", by_block_dequantizer),
    ("fp8", "blockwise", by_transformers),
    *(("compressed-tensors", scaling, by_compressed_tensors) for scaling in models.RECIPES),
]


@pytest.mark.parametrize(
    ("method", "scaling", "judge"), CASES, ids=lambda value: value if isinstance(value, str) else value.__name__
)
def test_other_programs_read_the_values(method: str, scaling: str, judge: Any, path: Path, tmp_path: Path) -> None:
    folder = models.serve(path, tmp_path / "out", method, models.RECIPES[scaling])
    found, wanted = judge(folder), models.read_back(folder)
    assert len(wanted) in (7, 21)  # the recipe of tensorwise scaling keeps the first and last layer
    for name, value in wanted.items():
        near = 2**-8 if scaling == "nvfp4" else 0  # compressed-tensors computes NVFP4's values in BF16
        assert torch.allclose(found[f"{name}.weight"].float(), value, rtol=near, atol=0), name
    plain = models.weights()
    assert torch.equal(found["lm_head.weight"].float(), plain["lm_head.weight"].float())


PRESETS = {"tensorwise": "FP8_DYNAMIC", "blockwise": "FP8_BLOCK", "mxfp8": "MXFP8", "nvfp4": "NVFP4A16"}


@pytest.mark.parametrize("scaling", PRESETS)
def test_compressed_tensors_takes_the_config_for_its_own_preset(scaling: str) -> None:
    schemes = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    row = next(row for row in FORMATS if row.method == "compressed-tensors" and scaling in row.scalings)
    read = pytest.importorskip("compressed_tensors.quantization").QuantizationConfig.model_validate(
        {**row.config, row.kept: ["lm_head"]}
    )
    wanted = schemes.preset_name_to_scheme(PRESETS[scaling], ["Linear"])
    (scheme,) = read.config_groups.values()
    assert json.loads(scheme.weights.model_dump_json()) == json.loads(wanted.weights.model_dump_json())
    mine, theirs = scheme.input_activations, wanted.input_activations
    assert (mine is None) == (theirs is None)
    for name in ("strategy", "dynamic", "group_size"):
        assert mine is None or getattr(mine, name) == getattr(theirs, name)
    assert read.ignore == ["lm_head"]
