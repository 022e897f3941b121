"""What every engine must do, as a suite to inherit: give `name` and `settings`, get the tests. Not collected by itself."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from mpbridge.backend.engines.contract import Engine
from tests import megatron_checkpoints
from tests.backend.engines import tiny

Build = Callable[..., Any]


def poisoned(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch whose loss, and so every gradient, is not a number, in any engine."""
    return batch | {"loss_mask": torch.full_like(batch["loss_mask"], float("nan"))}


def whole(tensor: Any) -> torch.Tensor:
    """A plain copy; of a DTensor the full tensor (FSDP2's root keeps its parameters unsharded after a forward pass, sharded otherwise)."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in engine.named_parameters()}


def save(engine: Any, folder: Path) -> None:
    folder.mkdir()
    megatron_checkpoints.save(engine.state(), folder)


def load(engine: Any, folder: Path, *, optimizer: bool = True) -> None:
    from megatron.core import dist_checkpointing

    engine.load_state(dist_checkpointing.load(engine.state(loading=True), str(folder)), optimizer=optimizer)


def _named(dtypes: Iterable[torch.dtype]) -> str:
    short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return " and ".join(sorted({short.get(dtype, str(dtype).removeprefix("torch.")) for dtype in dtypes}))


@contextlib.contextmanager
def computing(engine: Any) -> Iterator[set[torch.dtype]]:
    """Collects the dtypes of the weights that the layers' matrix products see in the forward pass."""
    found: set[torch.dtype] = set()
    handles = [
        module.register_forward_pre_hook(lambda module, _: found.add(module.weight.dtype))
        for chunk in engine.model
        for name, module in chunk.named_modules()
        if name.endswith(("linear_fc1", "linear_fc2", "linear_qkv", "linear_proj"))
    ]
    assert len(handles) == 8
    yield found
    for handle in handles:
        handle.remove()


def seen(engine: Any, computed: set[torch.dtype]) -> str:
    """What the model and the torch optimizers hold after a step, read from torch's own objects and not through the engine's accounts."""
    inner = [
        getattr(part, "optimizer", part) for part in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    ]
    updated = [parameter for part in inner for group in part.param_groups for parameter in group["params"]]
    # a scale beside quantized states is no state of its own
    states = [(key, value.dtype) for part in inner for state in part.state.values() for key, value in state.items()
              if isinstance(value, torch.Tensor) and value.numel() > 1]  # fmt: skip
    roles = {key: _named(dtype for name, dtype in states if name == key) for key, _ in sorted(states, key=str)}
    params = _named(parameter.dtype for _, parameter in engine.named_parameters())
    told = f"computes {_named(computed)}; params {params}; updates {_named(one.dtype for one in updated)}; "
    return told + ", ".join(f"{key} {names}" for key, names in roles.items())


class EngineContract:
    """Inherit, and set `name` to the engine's and `settings` to what its runs need besides; every test runs for each of `kinds`."""

    name: ClassVar[str]
    settings: ClassVar[dict[str, Any]] = {}
    kinds: ClassVar[tuple[Any, ...]] = ("fp32", "bf16")
    keeps: ClassVar[dict[str, str]] = {
        "fp32": "computes fp32; params fp32; updates fp32; exp_avg fp32, exp_avg_sq fp32",
        "bf16": "computes bf16; params bf16; updates fp32; exp_avg fp32, exp_avg_sq fp32",
    }

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "kind" in metafunc.fixturenames:
            metafunc.parametrize("kind", self.kinds, ids=str)

    @pytest.fixture
    def build(self, engines: Build) -> Build:
        """Makes engines of a kind; all are closed at the end."""

        def make(kind: Any, **changes: Any) -> Any:
            sections = {
                key: {**self.settings.get(key, {}), **changes.get(key, {})}
                for key in self.settings.keys() | changes.keys()
            }
            return engines(kind, engine=self.name, **sections)

        return make

    def test_training_moves_every_weight_the_loss_falls_and_evaluation_is_that_loss(
        self, build: Build, kind: Any
    ) -> None:
        engine = build(kind)
        assert isinstance(engine, Engine)
        assert engine.name == self.name
        before, batch, batches = weights(engine), next(tiny.batches()), tiny.batches()
        held = engine.evaluate(itertools.repeat(batch), microbatches=3)
        assert all(torch.equal(value, before[name]) for name, value in weights(engine).items()), "nothing is updated"
        alone = engine.backward(itertools.repeat(batch), microbatches=3)
        gradients = dict(engine.counted_gradients())
        norm = torch.stack([one.float().norm() for one in gradients.values()]).norm().item()
        results = [engine.train_step(itertools.repeat(batch), microbatches=3)]
        assert (results[0].loss, alone) == (pytest.approx(held, rel=1e-6), pytest.approx(held, rel=1e-6))
        assert results[0].grad_norm == pytest.approx(norm / results[0].loss_scale, rel=1e-4)
        assert gradients.keys() == before.keys()
        results += [engine.train_step(batches, microbatches=4) for _ in range(7)]
        assert all(result.applied and result.grad_norm and result.grad_norm > 0 for result in results)
        assert results[-1].loss < results[0].loss - 0.5
        assert results[0].lr == engine.run.inputs["optimizer"]["lr"]
        assert [name for name, value in weights(engine).items() if torch.equal(value, before[name])] == []

    @pytest.fixture
    def kept(self, kind: Any) -> str:
        """What torch itself must show for this kind, written by hand: see `seen`."""
        return self.keeps[kind]

    def test_every_tensor_has_its_dtype_and_a_nonfinite_gradient_changes_none(
        self, build: Build, kind: Any, kept: str
    ) -> None:
        engine, batches = build(kind), tiny.batches()
        with computing(engine) as computed:
            assert engine.train_step(batches, microbatches=2).applied
        assert seen(engine, computed) == kept
        names = [name for name, _ in engine.named_parameters()]
        assert len(set(names)) == len(names)
        for role in ("params", "exp_avg", "exp_avg_sq"):
            assert sorted(live.parameter for live in engine.tensors() if live.role == role) == sorted(names)
        before = weights(engine)
        result = engine.train_step(map(poisoned, batches), microbatches=2)
        assert (result.applied, result.grad_norm) == (False, None)
        assert all(torch.equal(value, before[name]) for name, value in weights(engine).items())
        after = engine.train_step(batches, microbatches=2)
        assert after.applied, "and neither do the moments remember it"
        assert all(value.isfinite().all() for value in weights(engine).values())

    def test_a_saved_state_goes_on_to_the_bit_and_its_weights_can_be_taken_alone(
        self, build: Build, kind: Any, tmp_path: Path
    ) -> None:
        """The engine that goes on is built in the process in which the first one was closed."""
        from megatron.core import parallel_state

        engine, batches = build(kind), tiny.batches()
        start = weights(engine)
        for _ in range(3):
            engine.train_step(batches, microbatches=2)
        save(engine, tmp_path / "checkpoint")
        kept, rest = weights(engine), [next(batches) for _ in range(2)]
        straight = [engine.train_step(iter(rest), microbatches=2) for _ in range(2)]
        final = weights(engine)

        load(engine, tmp_path / "checkpoint", optimizer=False)
        assert all(torch.equal(value, kept[name]) for name, value in weights(engine).items())
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        engine.train_step(batches, microbatches=2)
        # with a zero rate the update writes main weights back unchanged: they must be the ones just loaded
        assert all(torch.equal(value, kept[name]) for name, value in weights(engine).items())

        engine.close()
        assert not parallel_state.model_parallel_is_initialized()
        engine.close()  # twice is once
        resumed = build(kind)
        assert all(torch.equal(value, start[name]) for name, value in weights(resumed).items())
        load(resumed, tmp_path / "checkpoint")
        assert [resumed.train_step(iter(rest), microbatches=2) for _ in range(2)] == straight
        assert [name for name, value in weights(resumed).items() if not torch.equal(value, final[name])] == []
