"""How far a served folder is from training on the same tokens: log-probabilities under training's emulated numerics, the folder's, and plain BF16's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mpbridge.backend.megatron.emulated_linears import places
from mpbridge.common.errors import BadValue
from mpbridge.common.formats import E4M3
from mpbridge.numerics.codes import encode_fp8
from mpbridge.numerics.quantizer import Quantizer, Randomness
from mpbridge.precision.regions import Quant
from mpbridge.settings.container import ConfigContainer
from mpbridge.settings.huggingface.folder import read_config, tensors
from mpbridge.settings.huggingface.quantization import row_of, scales_are_static
from mpbridge.settings.huggingface.served import ServedFormat
from mpbridge.training.checkpoint.store import CONFIG
from mpbridge.training.checkpoint.verdict import FILE as FINGERPRINT
from mpbridge.training.checkpoint.verdict import read_fingerprint
from mpbridge.training.data.sources import tokenizer
from mpbridge.training.process import bare, process_group, with_weights
from mpbridge.training.serving.convert import checkpoint_run, opened
from mpbridge.training.serving.differences import is_plain, read_values
from mpbridge.training.serving.files import FolderReader, joined

Activation = Callable[[torch.Tensor], torch.Tensor]
"""x [tokens, features] -> the fp32 values that the engine's GEMM reads."""
_ONE_PROCESS = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Distance:
    """One way of serving, compared with training token by token."""

    name: str
    mean: float
    """Mean |log p of training - log p served|, nats."""
    k3: float
    """Mean of exp(d) - 1 - d with d the served log-probability minus training's: an estimate of the KL divergence, never negative."""
    greedy: float
    """Share of tokens whose most likely successor changes."""
    loss: float
    """Mean negative log-probability, nats."""


@dataclass(slots=True)
class Mismatch:
    """The result."""

    tokens: int
    loss: float
    """Training's."""
    distances: list[Distance] = field(default_factory=list)
    recipe: str = ""
    """Training's: in a schedule that of the stage that saved the checkpoint."""
    linears: dict[str, float] = field(default_factory=dict)
    """Linear -> norm of its output's error on training's own inputs, relative to the output; largest first."""


def mismatch(path: Path, folder: Path, text: str, *, sequences: int = 8) -> Mismatch:
    """The folder in `folder` against the run of the checkpoint in `path`, on the first `sequences` whole sequences of `text`.

    One process, on the CPU: tensor-parallel ranks' own scales are those of the whole. Raises BadValue for a text that is too short and a folder whose activations are
    quantized with static scales.
    """
    config = read_config(folder)
    quantization = config.get("quantization_config") or {}
    row = row_of(quantization) if quantization else None
    with _model(path) as engine:
        tokens = _tokens(engine.run, text, sequences)
        weights, others = _served_weights(path, folder, row)
        served = {
            name: (weight, activation_of(row, quantization) if low else _plain)
            for name, (weight, low) in weights.items()
        }
        result = Mismatch(tokens=tokens[:, 1:].numel(), loss=0.0, recipe=engine.run.recipe)
        squares: dict[str, tuple[float, float]] = {}
        with _observed(engine, served, squares):
            trained = _logits(engine, tokens)
        result.loss = -float(_chosen(trained, tokens).mean())
        plain = {name: (linear.weight.detach().bfloat16().float(), _plain) for name, linear in _linears(engine)}
        ways: Any = ((row.name if row is not None else "the folder", served, others), ("plain BF16", plain, {}))
        for name, numerics, values in ways:
            with _replaced(engine, numerics, values):
                result.distances.append(_distance(name, trained, _logits(engine, tokens), tokens))
    errors = {name: (wrong / right) ** 0.5 if right else 0.0 for name, (wrong, right) in squares.items()}
    result.linears = dict(sorted(errors.items(), key=lambda one: -one[1]))
    return result


@contextmanager
def _model(path: Path) -> Iterator[Any]:
    """The run's model with the checkpoint's weights, emulated in this process."""
    container = bare(ConfigContainer.load(path / CONFIG, check=False))
    container.target = None
    for name in _ONE_PROCESS:
        container.parallel.pop(name, None)
    container.parallel["sequence_parallel"] = False
    with process_group(False):
        run = container.resolved(1, training=False)
        if len(run.stages) > 1 and (path / FINGERPRINT).is_file():
            saved, stages = read_fingerprint(path), checkpoint_run(path).by_stage()
            alike = [(one.policy == saved.policy, one.recipe == saved.recipe) for one in stages]
            run = run.at(alike.index(max(alike)))
        if run.policy.quantized is False:
            raise BadValue(
                f"{path}: its recipe {run.recipe} quantizes nothing: training's numerics are those of plain {run.policy.compute.short}"
            )
        with with_weights(run, path, cuda=False) as engine, torch.no_grad():
            for chunk in engine.model:
                chunk.eval()
            yield engine


def _tokens(run: Any, text: str, sequences: int) -> torch.Tensor:
    """int64 [sequences, length + 1]."""
    length = int(run.facts.shape.seq_length)
    code = run.container.may_be_code("data.tokenizer")
    tok = tokenizer(run.data["tokenizer"], run.data.get("end_of_text"), code=code)
    made = tok.tokenize(text[: 64 * sequences * (length + 1)])
    count = min(sequences, len(made) // (length + 1))
    if not count:
        raise BadValue(f"the text has {len(made)} tokens, expected at least {length + 1}: one sequence of the run")
    found = torch.tensor(made[: count * (length + 1)]).view(count, length + 1)
    if int(found.max()) >= run.facts.shape.vocab_size:
        raise BadValue(
            f"the text has the token {int(found.max())}, and the model {run.facts.shape.vocab_size} rows: data.tokenizer is not the model's"
        )
    return found


def _served_weights(
    path: Path, folder: Path, row: ServedFormat | None
) -> tuple[dict[str, tuple[torch.Tensor, bool]], dict[str, torch.Tensor]]:
    """Linear of training -> (fp32 values in the folder [rows, columns], whether they are stored quantized); any other parameter -> its values in the folder."""
    found: dict[str, tuple[torch.Tensor, bool]] = {}
    others: dict[str, torch.Tensor] = {}
    held = tensors(folder)
    with opened(path) as export, FolderReader(folder, held, {}) as reader:
        for one in export.wanted:
            low, values = False, []
            for name, size in one.parts:
                module = name.removesuffix(".weight")
                its = [at for at in held if at.rpartition(".")[0] == module and at != f"{module}.bias"]
                loaded = {at: reader.raw(at) for at in its}
                try:
                    values.append(read_values(module, loaded, row) if module != name else reader.raw(name))
                except (KeyError, AssertionError, RuntimeError, BadValue):
                    raise BadValue(f"{folder}: {name} cannot be read (mpbridge contract {folder} says why)") from None
                got = tuple(values[-1].shape)
                # a folder's embedding is without the rows that pad the vocabulary
                if got != size and (one.linear or got[1:] != size[1:] or got[0] > size[0]):
                    raise BadValue(f"{folder}: {name} is {list(got)}, expected {list(size)}")
                low = low or (module != name and not is_plain(module, loaded))
            whole = joined(values, one.layout, export.shape)
            if one.linear:
                found[one.name.removesuffix(".weight")] = whole, low
            else:
                others[one.name] = whole
    return found, others


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.float()


def activation_of(row: ServedFormat | None, config: Mapping[str, Any]) -> Activation:
    """How an engine quantizes the input of a linear in that format. Raises BadValue for static scales."""
    if row is None:
        return _plain
    if scales_are_static(config):
        raise BadValue(f"{row.name}: activations are quantized with static scales of the folder, which is not emulated")
    if row.second:
        return _plain
    if row.layout == "channel":
        return _by_token
    scaling = "blockwise" if row.layout == "blocks" else "mxfp8"
    options = (("power_of_two", config.get("scale_fmt") == "ue8m0"),) if scaling == "blockwise" else ()
    cpu = torch.device("cpu")
    quant = Quant(format="e4m3", scaling=scaling, options=options)
    quantizer = Quantizer(quant, [], randomness=Randomness(0, cpu), device=cpu, compiled=False, environment={})
    return lambda x: quantizer.operand(x, slot="", gemm="fprop", side="x", wide=True).dequantized()


def _by_token(x: torch.Tensor) -> torch.Tensor:
    scale = (x.float().abs().amax(1, keepdim=True) / E4M3.largest).clamp_min(1e-12)
    return encode_fp8(x.float() / scale, E4M3).view(torch.float8_e4m3fn).float() * scale


Numerics = Mapping[str, tuple[torch.Tensor, Activation]]


def _linears(engine: Any) -> list[tuple[str, Any]]:
    return [(name, linear) for chunk in engine.model for linear, name, *_ in places(chunk)]


def _product(weight: torch.Tensor, activation: Activation, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    out = F.linear(activation(flat) if flat.numel() else flat.float(), weight, None if bias is None else bias.float())
    return out.to(x.dtype).view(*x.shape[:-1], -1)


@contextmanager
def _replaced(engine: Any, numerics: Numerics, others: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Every linear computes with those weights and activations, summed in fp32. others: the values of other parameters; an embedding may have more rows."""

    def product(name: str) -> Callable[..., torch.Tensor]:
        weight, activation = numerics[name]
        return lambda plain, x, own, *args, **kwargs: _product(weight, activation, x, kwargs.get("bias"))

    own = [(data, data.clone()) for name, one in engine.named_parameters() if name in others for data in [one.data]]
    for name, parameter in engine.named_parameters():
        if name in others:
            parameter.data[: len(others[name])] = others[name]
    try:
        with _with_products(engine, {name: product(name) for name, _ in _linears(engine)}):
            yield
    finally:
        for data, before in own:
            data.copy_(before)


@contextmanager
def _observed(engine: Any, numerics: Numerics, squares: dict[str, tuple[float, float]]) -> Iterator[None]:
    """Training's own products; the squares of what they and the served ones differ by, and of what they are, are summed by linear."""

    def product(name: str, linear: Any) -> Callable[..., torch.Tensor]:
        own_product = linear.product

        def both(plain: Any, x: torch.Tensor, own: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            out: torch.Tensor = own_product(plain, x, own, *args, **kwargs)
            error = _product(*numerics[name], x, kwargs.get("bias")).double() - out.double()
            wrong, right = squares.get(name, (0.0, 0.0))
            squares[name] = wrong + float(error.square().sum()), right + float(out.double().square().sum())
            return out

        return both

    with _with_products(engine, {name: product(name, linear) for name, linear in _linears(engine)}):
        yield


@contextmanager
def _with_products(engine: Any, products: Mapping[str, Callable[..., torch.Tensor]]) -> Iterator[None]:
    linears = _linears(engine)
    for name, linear in linears:
        linear.product = products[name]
    try:
        yield
    finally:
        for _, linear in linears:
            del linear.product


def _logits(engine: Any, tokens: torch.Tensor) -> torch.Tensor:
    """fp32 log-probabilities [sequences, length, vocabulary]."""
    inputs = tokens[:, :-1]
    positions = torch.arange(inputs.shape[1]).expand(1, -1)
    with engine.emulation.evaluating():
        found = [engine.model[0](part[None], positions, None).float().log_softmax(-1) for part in inputs.unbind()]
    return torch.cat(found)


def _chosen(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def _distance(name: str, trained: torch.Tensor, served: torch.Tensor, tokens: torch.Tensor) -> Distance:
    ours = _chosen(served, tokens)
    d = (ours - _chosen(trained, tokens)).double()
    changed = (trained.argmax(-1) != served.argmax(-1)).float().mean()
    return Distance(name, float(d.abs().mean()), float((d.exp() - 1 - d).mean()), float(changed), -float(ours.mean()))
