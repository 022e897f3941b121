"""The facts at the top of a page about a run, and the glossary."""

from __future__ import annotations

import datetime
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from mpbridge.common.shipped import VERSION
from mpbridge.common.tables import Column

GLOSSARY: Mapping[str, str] = {
    "amax": "The largest absolute value of a tensor.",
    "copy": "A quantized tensor may exist twice: in rows (blocks along the features) and in columns (blocks along the tokens), each made from the high-precision tensor.",
    "dgrad, fprop, wgrad": "The three matrix products of a linear: its output, the gradient of its input, the gradient of its weight.",
    "flushed": "Share of the nonzero elements that became zero, since they are below the format's smallest number.",
    "gradient to noise": "Norm of a weight's gradient over the norm of the error that quantization adds to it, on a sample of 64 x 64 elements of the first micro-batch. Below about 2 training learns little more from that weight.",
    "main weight": "The optimizer's own copy of a parameter in high precision; the model's parameter is that copy, rounded.",
    "operand": "One of the two tensors that a matrix product reads: x (activations), w (weights), dy (gradients).",
    "outlier": "The largest input channel's amax over the median channel's. One scale for the whole tensor then leaves the other channels few of the format's numbers.",
    "row error": "|q - x| / |x| of a row, median over rows: the effect of rounding on an ordinary row, regardless of an outlier's effect on the norm of the whole tensor.",
    "saturated": "Share of the elements beyond the format's largest number, which are clipped to it.",
    "scale": "The factor that elements are multiplied by before they are rounded to the format; with blocks, the median block's.",
    "SQNR": "Signal to quantization noise in decibels, -20 log10 of the relative error: about 32 dB for a Gaussian tensor in E4M3, 26 in E5M2, 19 in NVFP4.",
    "staleness": "Delayed scaling: log2 of the scale for this amax over the scale that was used. Below 0 elements saturate, far above 0 range is wasted.",
}
"""Term -> one sentence."""
_COLUMNS = (
    Column(name="layer", number=False, layer=True, help="layer of the model"),
    Column(name="GEMMs", number=False, help="matrix products that read it"),
    Column(name="format", number=False),
    Column(name="row error", unit="percent", help="median relative error of a row"),
    Column(name="flushed", unit="percent", help="share of the nonzero elements that became zero"),
    Column(name="saturated", unit="percent", help="share of the elements beyond the format's largest number"),
    Column(name="SQNR, dB", help="signal to quantization noise"),
    Column(name="staleness, log2", help="scale for the amax over the scale used; delayed scaling only"),
)
OPERAND_COLUMNS: Mapping[str, Column] = {column.name: column for column in _COLUMNS}
"""Columns of tables of quantized operands, by name."""


def glossary(*terms: str) -> dict[str, str]:
    """The entries of these terms, in order."""
    return {term: GLOSSARY[term] for term in sorted(terms, key=str.lower)}


def made_now(**facts: Any) -> dict[str, str]:
    """Facts at the top of a page, then the command, the date and the version."""
    ours = sys.argv[0].endswith(("mpbridge", "mpbridge/__main__.py"))
    command = shlex.join(["mpbridge", *sys.argv[1:]]) if ours else ""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    found = {name.replace("_", " "): str(value) for name, value in facts.items() if value not in (None, "", {})}
    return {**found, **({"command": command} if command else {}), "date": now, "mpbridge": VERSION}


def model_text(config: Mapping[str, Any]) -> str:
    """A model in a few words from its section: '4 layers, hidden 256 ...'; '' if nothing is known."""
    model = _section(config, "model")
    words = {
        "num_layers": "{} layers", "hidden_size": "hidden {}", "num_attention_heads": "{} heads", "ffn_hidden_size": "FFN {}",
        "num_moe_experts": "experts {}", "vocab_size": "vocabulary {}",
    }  # fmt: skip
    return ", ".join(word.format(model[name]) for name, word in words.items() if model.get(name))


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def data_text(config: Mapping[str, Any]) -> str:
    """A run's data in a few words."""
    known = {**_section(config, "data"), "global_batch_size": _section(config, "train").get("global_batch_size")}
    words = {
        "corpus": "corpus {}", "tokenizer": "tokenizer {}", "seq_length": "{} tokens per sample", "global_batch_size": "{} samples per step",
    }  # fmt: skip
    return ", ".join(word.format(known[name]) for name, word in words.items() if known.get(name))
