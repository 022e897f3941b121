"""Scores against products computed by hand, outliers that are planted, and a module that is left as it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mpbridge
from mpbridge.common.errors import BadValue, DataError, Refused
from mpbridge.common.machines import machine
from mpbridge.numerics import emulate_linears
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve
from mpbridge.training.tune.choices import LOW
from mpbridge.training.tune.levels import Where
from mpbridge.training.tune.scores import Scorer

NVFP4 = "bf16_with_nvfp4_mixed"


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.left, self.right = torch.nn.Linear(width, 2 * width, bias=False), torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.left(y)) * self.right(y))


class Net(torch.nn.Module):
    def __init__(self, layers: int = 3, width: int = 32) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.head = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net(layers: int = 3) -> Net:
    torch.manual_seed(0)
    return Net(layers).bfloat16()


def batches(count: int, width: int = 32) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(64, width, generator=draw).bfloat16() for _ in range(count)]


def loss(module: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (module(batch).float() - batch.float().roll(1, 1)).square().mean()


def test_a_score_is_the_sum_of_gradient_times_error_over_the_products() -> None:
    """By hand: the emulated linear's own forward and backward on the operands that hooks and torch's autograd show."""
    model, batch = net(), batches(1)[0]
    policy = resolve(get_mixed_precision_config("mxfp8"))
    seen: dict[str, Any] = {}
    linear = model.layers[1].down
    linear.register_forward_hook(lambda module, args, out: seen.update(x=args[0].detach()))
    linear.register_full_backward_hook(lambda module, gin, gout: seen.update(dy=gout[0].detach(), dx=gin[0].detach()))
    loss(model, batch).backward()
    dw, x, dy = linear.weight.grad.detach().clone(), seen["x"], seen["dy"]
    own = torch.nn.ModuleList([torch.nn.Linear(64, 32).bfloat16()])
    own[0].load_state_dict(linear.state_dict())
    emulation = emulate_linears(own, policy, compiled=False)
    emulation.step_begin()
    inner = x.clone().requires_grad_()
    out = own[0](inner)
    out.backward(dy)
    exact = torch.nn.functional.linear(x, linear.weight, linear.bias)
    by_hand = {
        "fprop": ((out - exact).float() * dy.float()).square().sum(),
        "dgrad": ((inner.grad - seen["dx"]).float() * x.float()).square().sum(),
        "wgrad": (own[0].weight.grad - dw).float().square().sum(),
    }

    model.zero_grad()
    emulation = emulate_linears(model, policy, compiled=False)
    scorer = Scorer({LOW: policy.quant}, emulation)  # type: ignore[dict-item]
    with emulation.listening(scorer):
        loss(model, batch).backward()
    found = scorer.halves[0]["layers.1.down", LOW].score
    for gemm, value in by_hand.items():
        # the bias is outside of the products, so its rounding differs
        assert found[gemm] == pytest.approx(float(value.detach()), rel=0.05), gemm
    assert len(scorer.halves[0]) == 9


def test_listening_changes_no_gradient() -> None:
    model, batch = net(), batches(1)[0]
    loss(model, batch).backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    policy = resolve(get_mixed_precision_config(NVFP4))
    emulation = emulate_linears(model, policy, compiled=False)
    with emulation.listening(Scorer({LOW: policy.quant}, emulation)):  # type: ignore[dict-item]
        loss(model, batch).backward()
    # the bias's gradient is summed in fp32 here
    for before, parameter in zip(plain, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, before, rtol=0.02, atol=1e-4)


def test_a_planted_outlier_channel_moves_its_linear_up_and_the_module_stays_as_it_was() -> None:
    model = net(4)
    with torch.no_grad():
        # one hidden channel a hundred times the others, undone by the next weight: high precision does not notice, blocks of 16 do
        model.layers[2].right.weight[5] *= 100
        model.layers[2].right.bias[5] *= 100
        model.layers[2].down.weight[:, 5] /= 100
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result, content = mpbridge.tune_module(
        model, loss, batches(7), NVFP4, levels=("bf16",), budget="time=1.3", unseen=3, compiled=False
    )
    assert result.choice["2.down"] == "bf16"
    assert [unit.kind for unit in result.units[:2]] == ["left + right", "down"]
    assert result.proof["tuned"].error < result.proof["all low"].error
    assert result.spent["tuned"] <= 1.3
    assert result.predicted == pytest.approx(result.proof["tuned"].error, rel=0.5)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert {type(layer.down) for layer in model.layers} == {torch.nn.Linear}
    assert all(parameter.grad is None for parameter in model.parameters())
    assert content["evidence"]["names of another model"] == "Net"


def test_the_work_grows_with_linears_times_formats_and_not_with_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays of single linears: each under each format, once a batch. Passes through the whole model: as many for four layers as for two."""
    replays, passes = [0], [0]
    real = Scorer._replayed

    def replayed(self: Scorer, *operands: Any) -> Any:
        replays[0] += 1
        return real(self, *operands)

    def counted(module: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        passes[0] += 1
        return loss(module, batch)

    monkeypatch.setattr(Scorer, "_replayed", replayed)
    found = []
    for layers, levels in ((2, ("bf16",)), (2, ("mxfp8",)), (4, ("mxfp8",))):
        replays[0] = passes[0] = 0
        mpbridge.tune_module(net(layers), counted, batches(6), NVFP4, levels=levels, unseen=2, compiled=False)
        found.append((replays[0], passes[0]))
    assert [count for count, _ in found] == [2 * 3 * 1 * 4, 2 * 3 * 2 * 4, 4 * 3 * 2 * 4]
    assert found[1][1] == found[2][1]


def test_every_policy_sees_the_same_dropout_masks() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 32)).bfloat16()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    result, _ = mpbridge.tune_module(model, loss, batches(6), "mxfp8", levels=(), unseen=2, compiled=False)
    assert torch.equal(torch.get_rng_state(), before)
    # other masks alone are an error of about 1; MXFP8's own is a few percent
    assert result.proof["all low"].error < 0.1


def test_the_recipe_acts_on_the_modules_own_names() -> None:
    recipe = get_mixed_precision_config(NVFP4).derive(modules={"down": [{"layers": "1", "precision": "bf16"}]})
    model = net()
    emulation = mpbridge.emulate(model, recipe, compiled=False)
    assert emulation.high == ["layers.1.down"]
    assert len(emulation.plugs) == 8
    emulation.detach()
    assert type(model.layers[0].down) is torch.nn.Linear


def test_a_linear_whose_shape_does_not_fit_is_no_candidate() -> None:
    model = net()
    model.layers[0].down = torch.nn.Linear(64, 32).bfloat16()
    model.layers[1].left, model.layers[1].right = (torch.nn.Linear(32, 24).bfloat16() for _ in range(2))
    model.layers[1].down = torch.nn.Linear(24, 32).bfloat16()
    result, _ = mpbridge.tune_module(model, loss, batches(6), NVFP4, unseen=2, compiled=False)
    odd = next(mine for unit, mine in zip(result.units, result.options, strict=True) if unit.name == "1.down")
    assert set(odd) == {"bf16"}
    assert any("cannot be quantized" in note for note in result.notes)


def backward_too(module: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found = loss(module, batch)
    found.backward()
    return found


def emulated() -> Net:
    model = net(1)
    mpbridge.emulate(model, NVFP4, compiled=False)
    return model


def poisoned(number: int) -> list[torch.Tensor]:
    some = batches(7)
    some[number][3, 4] = float("nan")
    return some


CONV = torch.nn.ModuleDict({"h": torch.nn.ModuleList([torch.nn.Conv1d(4, 4, 1)]), "head": torch.nn.Linear(32, 32)})
NARROW = torch.nn.Sequential(torch.nn.Linear(32, 24), torch.nn.Linear(24, 32)).bfloat16()
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"module": torch.nn.ReLU()}, Refused, "no torch.nn.Linear"),
    ({"module": CONV}, Refused, "no torch.nn.Linear in its layers .head lies outside of them.*Conv1d"),
    ({"module": NARROW}, Refused, "no linear of this model can be quantized this way.*input features 24"),
    ({"module": emulated}, Refused, "is emulated already.*detach"),
    ({"module": lambda: net(1).requires_grad_(False)}, Refused, "every parameter of Net is frozen"),
    ({"step": backward_too}, BadValue, "the step called backward itself"),
    ({"step": lambda m, b: loss(m, b).detach()}, BadValue, "scalar tensor with its graph"),
    ({"batches": batches(6), "unseen": 4}, BadValue, "fewer than 4"),
    (
        {"batches": batches(7), "unseen": 4},
        BadValue,
        "^7 batches, 4 .* unseen, leave 3 to score.*give 8 batches or more",
    ),
    ({"batches": poisoned(1)}, DataError, "scoring batch 2 is nan"),
    ({"batches": poisoned(6)}, DataError, "unseen batch 2 is nan"),
    ({"batches": iter(batches(8))}, BadValue, "batches is a list_iterator, expected a sequence"),
    ({"recipe": "bf16_mixed"}, Refused, "quantizes nothing"),
    ({"recipe": "bf16_with_fp8_delayed_scaling_mixed"}, Refused, "no module can differ"),
    ({"where": Where(machine=machine("h100"))}, Refused, "the recipe does not run on H100"),
    ({"budget": "time=0.5"}, BadValue, "nothing meets it"),
    ({"budget": "time=9"}, BadValue, "everything meets it"),
    ({"budget": "gradient-error=5"}, BadValue, "everything meets it"),
    ({"budget": "gradient-error=1e-9"}, BadValue, "only bf16 for all linears meets it.*or a larger error"),
    ({"budget": "memory=1GB"}, BadValue, "--config"),
    ({"budget": 1.3}, BadValue, "1.3.*expected time=1.1"),
]
"""What differs from a call that works, the error, what it says."""


@pytest.mark.parametrize(("changed", "error", "says"), BAD, ids=[says for _, _, says in BAD])
def test_bad_input_is_a_sentence(changed: dict[str, Any], error: type[Exception], says: str) -> None:
    call: dict[str, Any] = {"module": net, "step": loss, "batches": batches(7), "recipe": NVFP4, "unseen": 2} | changed
    if not isinstance(call["module"], torch.nn.Module):
        call["module"] = call["module"]()
    with pytest.raises(error, match=says):
        mpbridge.tune_module(**call)


@pytest.mark.parametrize(
    ("model", "says"), [(torch.nn.ReLU, "no torch.nn.Linear"), (emulated, "is emulated already.*detach")]
)
def test_emulating_what_cannot_be_is_refused_alike(model: Any, says: str) -> None:
    with pytest.raises(Refused, match=says):
        mpbridge.emulate(model(), NVFP4)


def test_a_format_that_overflows_is_infinitely_wrong_and_no_fault_of_the_data() -> None:
    """By hand: a policy whose emulated gradient is not finite in one batch, beside one that is high precision itself."""
    import math

    from mpbridge.training.tune.proof import prove

    class Stub:
        class emulation:
            policy, is_paused = "own", False

            @classmethod
            def switch(cls, policy: Any) -> None:
                cls.policy = policy

            @staticmethod
            def step_at(step: int) -> None: ...

            @classmethod
            def paused(cls) -> Any:
                import contextlib

                @contextlib.contextmanager
                def held() -> Any:
                    before, cls.policy = cls.policy, "high"
                    yield
                    cls.policy = before

                return held()

        number = 0

        def backward(self, split: str, number: int) -> float:
            self.number = number
            return math.nan if self.emulation.policy == "bad" and number == 1 else 1.0

        def gradients(self) -> list[torch.Tensor]:
            exact = torch.tensor([3.0, 4.0])
            off = {"bad": [math.nan, 0.0] if self.number else [0.0, 0.0], "shared": [0.0, 1.0]}
            off["alternating"] = [0.0, 1.0 if self.number % 2 else -1.0]
            return [exact + torch.tensor(off.get(self.emulation.policy, [0.0, 0.0]))]

    arms: Any = {"bad": "bad", "shared": "shared", "alternating": "alternating", "exact": "exact"}
    found = prove(Stub(), arms, 4)  # type: ignore[arg-type]
    assert found["bad"].error == math.inf
    assert found["exact"].error == 0.0
    # off by 1 of 5: all of it the same in every batch, or none of it
    assert found["shared"].error == found["alternating"].error == pytest.approx(0.2)
    assert (found["shared"].bias, found["shared"].noise) == (pytest.approx(0.2), 0.0)
    assert found["alternating"].bias == 0.0
    assert found["alternating"].noise == pytest.approx(0.2)
    assert found["exact"].better_than(found["bad"])[0] == math.inf


@pytest.mark.parametrize(
    ("recipe", "cure"),
    [
        ("mxfp8", "check that batch, or start from another checkpoint"),
        ("fp16_with_mxfp8_mixed", "a lower loss scale may"),
    ],
)
def test_a_gradient_that_is_not_finite_is_cured_by_a_lower_loss_scale_only_where_there_is_one(
    recipe: str, cure: str
) -> None:
    def steep(module: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (module(batch).float() * 0).sum().abs().sqrt()  # 0, with an infinite slope

    with pytest.raises(DataError, match=rf"not finite in high precision either, .* \({cure}\)"):
        mpbridge.tune_module(net(), steep, batches(8), recipe=recipe)


@pytest.mark.parametrize("room", [1 << 13, 1 << 10])
def test_products_of_folded_vectors_are_those_of_the_vectors(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three errors that share a part: exact where they fit, within a few of the expected standard errors where they are folded."""
    from mpbridge.training.tune import proof

    monkeypatch.setattr(proof, "FOLD", room)
    proof._signs.cache_clear()
    draw = torch.Generator().manual_seed(0)
    shared = torch.randn(5000, generator=draw)
    vectors = [shared + torch.randn(5000, generator=draw) for _ in range(3)]
    folded = proof.Folded()
    norms = [folded.add([vector[:1234], vector[1234:].view(2, -1)]) for vector in vectors]
    assert norms == pytest.approx([float(vector.double().square().sum()) for vector in vectors])
    exact = sum(float(a.double() @ b.double()) for a in vectors for b in vectors if a is not b)
    assert folded.across() == pytest.approx(exact, rel=1e-5 if room > 5000 else 0.2)
    proof._signs.cache_clear()


class Experts(Net):
    """Two experts in one tensor, as transformers holds them."""

    def __init__(self) -> None:
        super().__init__(1)
        self.layers[0].experts = torch.nn.Module()
        self.layers[0].experts.gate = torch.nn.Parameter(torch.ones(2, 32, 32) / 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.layers[0].experts.gate.sum(0)


def test_weights_that_no_linear_holds_are_said_to_stay_as_they_are() -> None:
    result, _ = mpbridge.tune_module(Experts().bfloat16(), loss, batches(6), NVFP4, unseen=2)
    assert [
        note for note in result.notes if "22% of the parameters are in 1 weight outside of torch.nn.Linear" in note
    ], result.notes
    assert "as layers.0.experts.gate of Module" in " ".join(result.notes)


WITHOUT_CORE = """
import sys
sys.modules["megatron"] = None
import torch
import mpbridge
from mpbridge.cli.main import main
module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).bfloat16()
batches = [torch.randn(32, 64, dtype=torch.bfloat16) for _ in range(6)]
loss = lambda module, batch: module(batch).float().square().mean()
result, content = mpbridge.tune_module(module, loss, batches, "bf16_with_nvfp4_mixed", budget="time=2", unseen=2)
assert len(result.choice) == 2, result.choice
assert "megatron" not in content["evidence"]["found by"]
import mpbridge.training.tune.run
from mpbridge.training.tune.run import lines
said = lines(result, "bf16_with_nvfp4_mixed")
assert "fewer than three decisions" in said[1] and "agreement of two halves" not in content["evidence"], said
sys.exit(main(["tune", "--config", sys.argv[1], "--recipe", "bf16_with_nvfp4_mixed"]))
"""


def test_a_module_needs_no_megatron_core_and_a_configuration_says_that_it_does(tmp_path: Path) -> None:
    config = Path(__file__).parents[3] / "configs" / "gpt_tiny.yaml"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_CORE, str(config)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1, done.stderr
    assert "this requires megatron-core, which is not installed" in done.stderr
    assert "Traceback" not in done.stderr
