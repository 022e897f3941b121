"""Which figures of a certificate predict training: rank correlations over recipes and variants on a small model. `python scripts/evidence/certificate_correlation.py [SEED ...]` trains the seeds (1, 2 and 3) and writes data/certificate_correlation.json.

For each seed a GPT is trained in FP32 on a generated source (`Source`); over 200 of its steps, in which its loss falls fast, every arm's gradient is compared with the FP32 gradient of the same weights and batch, every
20 steps. Then every arm trains 200 steps from the same weights on the same batches, and its evaluation loss (computed in FP32) is compared with FP32's. Arms are ranked by each figure of
their certificate and by what was measured, all of them and NVFP4's alone. `... rows` computes certificates and correlations anew, beside what the file's runs measured.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
warnings.filterwarnings("ignore")

import torch
from torch import nn
from torch.nn import functional as F

from mpbridge import get_mixed_precision_config, resolve
from mpbridge.numerics.certificates.certificate import certificate
from mpbridge.numerics.certificates.expected import varied, vary
from mpbridge.numerics.modules import emulate_linears
from mpbridge.planning.certificates import VARIANTS, Training
from mpbridge.precision.policy import PrecisionPolicy

DATA = Path(__file__).resolve().parent / "data" / "certificate_correlation.json"
WIDTH, HEADS, LAYERS, LENGTH, BATCH, BEFORE, STEPS, EVERY, LR = 128, 4, 2, 32, 8, 500, 200, 20, 1e-3
SYMBOLS, SUCCESSORS = 16, 8
KINDS = ("normal", "student-3", "sparse")
ARMS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "bf16": ("bf16_mixed", {}, None),
    "fp16": ("fp16_mixed", {}, None),
    "tensorwise hybrid": ("bf16_with_fp8_current_scaling_mixed", {}, None),
    "tensorwise e4m3": ("bf16_with_fp8_current_scaling_mixed", {"fp8": "e4m3"}, None),
    "blockwise hybrid": ("bf16_with_fp8_subchannel_scaling_mixed", {}, None),
    "blockwise e4m3": ("bf16_with_fp8_subchannel_scaling_mixed", {"fp8": "e4m3"}, None),
    "mxfp8 e4m3": ("bf16_with_mxfp8_mixed", {}, None),
    "mxfp8 hybrid": ("bf16_with_mxfp8_mixed", {"fp8": "hybrid"}, None),
    "nvfp4": ("bf16_with_nvfp4_mixed", {}, None),
} | {
    f"nvfp4 {name}": ("bf16_with_nvfp4_mixed", {}, name)
    for name in ("no-sr", "no-rht", "1d-weights", "4over6", "scale-up", "headroom", "ms-eden", "ms-eden-fixed")
}
"""Arm -> recipe, changed fields, variant."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(F.gelu(self.up(self.second(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, 0, 0.02)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.tokens(batch[:, :-1]) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten())


class Source:
    """Symbols of a second-order chain, the same in every run: each pair of symbols has eight successors, with probabilities in proportion to 1, 1/2 ... 1/8."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        shape = (SYMBOLS, SYMBOLS, SUCCESSORS)
        self.successors = torch.randint(0, SYMBOLS, shape, generator=torch.Generator().manual_seed(0))
        self.chances = 1 / torch.arange(1.0, SUCCESSORS + 1)

    def batch(self) -> torch.Tensor:
        """[batch, length + 1]"""
        rows = [*torch.randint(0, SYMBOLS, (2, BATCH), generator=self.generator)]
        which = torch.multinomial(self.chances, BATCH * LENGTH, replacement=True, generator=self.generator)
        for column in which.view(LENGTH, BATCH):
            rows.append(self.successors[rows[-2], rows[-1], column])
        return torch.stack(rows[1:], 1)


def policy_of(arm: str) -> PrecisionPolicy:
    recipe, fields, variant = ARMS[arm]
    config = get_mixed_precision_config(recipe)
    for name, value in ({"first_last_layers_bf16": False} | fields).items():
        setattr(config, name, value)
    policy = resolve(config).settled()
    return policy if variant is None else varied(policy, VARIANTS[variant])


class Emulated:
    """A model whose linears in its layers run under an arm; 16-bit arms cast them under autocast."""

    def __init__(self, model: Model, arm: str) -> None:
        policy, variant = policy_of(arm), ARMS[arm][2]
        self.emulation, self.kind = None, policy.compute.torch()
        if policy.quantized:
            self.emulation = emulate_linears(model, policy, compiled=False, release="2.17")
            for quantizer in self.emulation.quantizers.values():
                if variant is not None:
                    vary(quantizer, VARIANTS[variant])
        self.model, self.at = model, 0

    def backward(self, batch: torch.Tensor) -> None:
        if self.emulation is not None:
            self.emulation.step_begin()
        with torch.autocast("cpu", dtype=self.kind):
            loss = self.model.loss(batch)
        loss.backward()

    def close(self) -> None:
        if self.emulation is not None:
            self.emulation.detach()


def gradient(model: Model) -> torch.Tensor:
    """Of the weights inside the layers."""
    return torch.cat(
        [
            p.grad.flatten()
            for n, p in model.named_parameters()
            if n.startswith("layers") and p.dim() == 2 and p.grad is not None
        ]
    ).double()


def stepped(model: Model, optimizer: torch.optim.Optimizer, at: int) -> None:
    optimizer.param_groups[0]["lr"] = (
        LR * min(1.0, (at + 1) / 20) * (1.0 if at < BEFORE else 1 - 0.9 * (at - BEFORE) / STEPS)
    )
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def evaluated(model: Model, seed: int) -> float:
    source = Source(10_000 + seed)
    with torch.no_grad():
        return statistics.fmean(float(model.loss(source.batch())) for _ in range(32))


def seeded(seed: int) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, source = Model(), Source(seed)
    optimizer = torch.optim.AdamW(model.parameters(), LR, (0.9, 0.95), weight_decay=0.1)
    errors: dict[str, list[float]] = {arm: [] for arm in ARMS}
    saved: Any = None
    later = []
    for at in range(BEFORE + STEPS):
        if at == BEFORE:
            saved = json_free((model.state_dict(), optimizer.state_dict()))
        batch = source.batch()
        later += [batch] if at >= BEFORE else []
        if at >= BEFORE and (at - BEFORE) % EVERY == 0:
            model.loss(batch).backward()
            exact = gradient(model)
            for arm in ARMS:
                model.zero_grad()
                run = Emulated(model, arm)
                run.backward(batch)
                run.close()
                errors[arm].append(float((gradient(model) - exact).norm() / exact.norm()))
            model.zero_grad()
        model.loss(batch).backward()
        stepped(model, optimizer, at)
    base = evaluated(model, seed)
    found = {}
    for arm in ARMS:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(json_free(saved[1]))
        run = Emulated(model, arm)
        for at, batch in enumerate(later):
            run.backward(batch)
            stepped(model, optimizer, BEFORE + at)
        run.close()
        found[arm] = {"gradient": statistics.fmean(errors[arm]), "loss": evaluated(model, seed) - base}
        print(
            f"seed {seed} {arm}: gradient error {found[arm]['gradient']:.4f}, loss {found[arm]['loss']:+.4f}",
            flush=True,
        )
    return found


def json_free(value: Any) -> Any:
    """A copy whose tensors are clones."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: json_free(v) for k, v in value.items()}
    return type(value)(json_free(v) for v in value) if isinstance(value, (list, tuple)) else value


def figures(arm: str) -> dict[str, float]:
    """The arm's certificate, larger = worse."""
    recipe, _, variant = ARMS[arm]
    training = Training(sigma=0.02, points=((0.0, LR),))
    made = certificate(
        recipe,
        policy_of(arm),
        training,
        variant=None if variant is None else VARIANTS[variant],
        release=(2, 17),
        kinds=KINDS,
        replicas=3,
    )
    found = {}
    for kind in KINDS:
        for gemm in ("fprop", "dgrad", "wgrad"):
            for word in ("one step bits", "plateau bits"):
                found[f"{gemm}, {word}, {kind}"] = -(made.value(gemm, word, kind) or 0.0)
        found[f"gradients' MSE, {kind}"] = made.value("dgrad dy row", "MSE", kind) or 0.0
        found[f"gradients' |alignment|, {kind}"] = abs(made.value("dgrad dy row", "alignment", kind) or 0.0)
        found[f"|alignment over fresh data|, {kind}"] = abs(
            made.value("wgrad", "alignment over fresh data", kind) or 0.0
        )
    return found


def ranks(values: list[float]) -> list[float]:
    order = sorted(values)
    return [order.index(v) + (order.count(v) - 1) / 2 for v in values]


def spearman(a: list[float], b: list[float]) -> float:
    return 0.0 if len(set(a)) == 1 or len(set(b)) == 1 else statistics.correlation(ranks(a), ranks(b))


def measured(seeds: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    began = time.perf_counter()
    certified = {arm: figures(arm) for arm in ARMS}
    trained = {seed: seeded(int(seed)) for seed in seeds or ("1", "2", "3")}
    return {"seconds": round(time.perf_counter() - began), "trained": trained, "certified": certified}


def correlated(data: dict[str, Any]) -> dict[str, Any]:
    """`measured` with "rows", figure -> the seeds' correlations by what was measured and among which arms, and "between seeds", those of one seed with another."""
    certified, trained = data["certified"], list(data["trained"].values())
    groups = {"all": list(ARMS), "nvfp4": [arm for arm in ARMS if arm.startswith("nvfp4")]}
    keys = [(f"{key}, {name}", key, arms) for key in ("gradient", "loss") for name, arms in groups.items()]
    rows: dict[str, Any] = {}
    for name in next(iter(certified.values())):
        rows[name] = {
            title: [spearman([certified[arm][name] for arm in arms], [found[arm][key] for arm in arms]) for found in trained]
            for title, key, arms in keys
        }  # fmt: skip
        print(name, rows[name], flush=True)
    between = {
        title: [spearman([a[arm][key] for arm in arms], [b[arm][key] for arm in arms]) for a, b in itertools.combinations(trained, 2)]
        for title, key, arms in keys
    }  # fmt: skip
    return data | {"between seeds": between, "rows": rows}


def main() -> None:
    again = sys.argv[1:] == ["rows"]
    if again:
        data = json.loads(DATA.read_text(encoding="utf-8")) | {"certified": {arm: figures(arm) for arm in ARMS}}
    else:
        data = measured(sys.argv[1:])
    DATA.write_text(json.dumps(correlated(data), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
