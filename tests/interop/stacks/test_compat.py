"""Megatron Bridge's names over our registry: what scripts written for it see, and where our decisions differ."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
import subprocess
import sys
import types
from typing import Any, ClassVar

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from mpbridge import MixedPrecisionConfig, get_mixed_precision_config, plan, recipes, resolve
from mpbridge.common.errors import Contradiction, RecipeError, UnknownName
from mpbridge.interop import megatron_bridge as bridge
from mpbridge.interop.stacks.megatron_bridge_import import FIELDS
from mpbridge.precision.registry import unregister


def configs() -> tuple[TransformerConfig, OptimizerConfig, DistributedDataParallelConfig]:
    model = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4)
    return model, OptimizerConfig(lr=1e-4), DistributedDataParallelConfig(use_distributed_optimizer=True)


def test_the_class_has_bridges_fields_defaults_and_module() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(bridge.MixedPrecisionConfig)}
    assert fields == FIELDS
    assert bridge.MixedPrecisionConfig.__module__ == "megatron.bridge.training.mixed_precision"


@pytest.mark.parametrize("name", [name for name in bridge.MIXED_PRECISION_RECIPES if "-" not in name])
def test_setup_writes_what_our_plan_writes(name: str) -> None:
    targets, ours = dict(zip(("model", "optimizer", "ddp"), configs(), strict=True)), get_mixed_precision_config(name)
    bridge.get_mixed_precision_config(name).setup(*targets.values())
    wanted = plan(resolve(ours), model={}, optimizer={}, ddp={"use_distributed_optimizer": True})
    assert wanted.writes
    for write in wanted.writes:
        if hasattr(targets[write.target], write.field):
            found = getattr(targets[write.target], write.field)
            assert str(found).removeprefix("torch.") == str(getattr(write.after, "value", write.after)), write.name


def test_a_value_that_is_the_default_is_written_over_another() -> None:
    model, optimizer, ddp = configs()
    model.bf16, model.params_dtype, ddp.grad_reduce_in_fp32 = True, torch.bfloat16, True
    bridge.get_mixed_precision_config("fp16_mixed").setup(model, optimizer, ddp)
    assert optimizer.fp8_recipe is None, "an inert scaling does not reach the optimizer"
    assert (model.bf16, model.fp16, model.params_dtype, ddp.grad_reduce_in_fp32) == (False, True, torch.float16, False)


def test_changes_and_fields_that_a_target_lacks_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    @dataclasses.dataclass
    class Small:
        bf16: bool = False
        other: int = 3

    small = Small()
    with caplog.at_level(logging.DEBUG):
        assert bridge.update_config_with_precision_overrides(bridge.bf16_mixed(), small) is small
    assert (small.bf16, small.other) == (True, 3)
    assert "Overwrote Small.bf16  False -> True" in caplog.text
    assert "Small has no" in caplog.text


def test_both_spellings_are_one_recipe_and_unknown_names_are_value_errors() -> None:
    assert bridge.get_mixed_precision_config("bf16-mixed") == bridge.bf16_mixed()
    assert bridge.MIXED_PRECISION_RECIPES["bf16_mixed"] is bridge.MIXED_PRECISION_RECIPES["bf16-mixed"]
    with pytest.raises(ValueError, match=r"Unknown mixed-precision recipe 'bf16_mixd'.*nearest: bf16_mixed"):
        bridge.get_mixed_precision_config("bf16_mixd")


def test_setup_leaves_the_root_logger_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    bridge.MixedPrecisionConfig(bf16=True).setup(types.SimpleNamespace(bf16=False))
    assert logging.root.handlers == []


def test_a_registered_recipe_is_in_both_registries_and_keeps_bridges_fields() -> None:
    @bridge.register
    def mine_over_there() -> bridge.MixedPrecisionConfig:
        """Mine."""
        return bridge.MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="blockwise")

    try:
        assert recipes["mine_over_there"].make().fp8_recipe == "blockwise"
        assert bridge.MIXED_PRECISION_RECIPES["mine-over-there"] is bridge.MIXED_PRECISION_RECIPES["mine_over_there"]
        assert bridge.get_mixed_precision_config("mine-over-there").fp8_recipe == "blockwise"
    finally:
        unregister("mine_over_there")


def test_a_registered_function_is_asked_for_a_config() -> None:
    given: list[Any] = [5, MixedPrecisionConfig(bf16=True, fp8="hybrid")]

    @bridge.register
    def mine_of_another_kind() -> Any:
        return given[0]

    try:
        with pytest.raises(RecipeError, match="returned int, expected a MixedPrecisionConfig"):
            bridge.get_mixed_precision_config("mine_of_another_kind")
        del given[0]
        made = bridge.get_mixed_precision_config("mine_of_another_kind")
        assert (type(made), made.fp8) == (bridge.MixedPrecisionConfig, "hybrid")
    finally:
        unregister("mine_of_another_kind")


def test_twins_follow_the_last_assignment_and_contradict_within_one_constructor() -> None:
    config = bridge.MixedPrecisionConfig(fp8_param_gather=True)
    assert config.fp8_param is True
    config.fp8_param = False
    assert config.fp8_param_gather is False
    for stored in (False, True):
        with pytest.raises(Contradiction, match="are the same setting"):
            bridge.MixedPrecisionConfig(fp8_param=stored, fp8_param_gather=not stored)
    stored_in_fp8 = bridge.bf16_with_fp8_current_scaling_mixed()
    with pytest.raises(Contradiction, match=r"dataclasses\.replace, which passes both: assign it"):
        dataclasses.replace(stored_in_fp8, fp8_param_gather=False)
    assert dataclasses.replace(stored_in_fp8, hysteresis=3).fp8_param_gather is True


def test_a_subclass_may_have_fields_of_its_own() -> None:
    @dataclasses.dataclass(kw_only=True)
    class Own(bridge.MixedPrecisionConfig):
        extra: int = 3
        made: int = dataclasses.field(default=1, init=False)
        kind: ClassVar[str] = "own"

    assert copy.copy(Own(bf16=True, extra=4)).extra == 4
    assert Own(bf16=True).ours() == MixedPrecisionConfig(bf16=True)


def test_setup_knows_that_megatron_fsdp_shards() -> None:
    # the same three configs by the plan of our own: Megatron-FSDP has no buffer that the gather could reuse (megatron/training/arguments.py)
    model, optimizer, ddp = configs()
    ddp.use_megatron_fsdp = True
    wanted = plan(resolve(get_mixed_precision_config("mxfp8")), model=model, optimizer=optimizer, ddp=ddp)
    made = bridge.get_mixed_precision_config("mxfp8").setup(model, optimizer, ddp)
    assert (optimizer.reuse_grad_buf_for_mxfp8_param_ag, ddp.reuse_grad_buf_for_mxfp8_param_ag) == (False, False)
    assert ddp.fp8_param_gather is True
    assert [write.name for write in made.writes] == [write.name for write in wanted.writes]


def test_what_no_field_expresses_is_refused_before_anything_is_written() -> None:
    model, optimizer, ddp = configs()
    wide = bridge.MixedPrecisionConfig(bf16=True, params_dtype=torch.float32)
    for attempt in (
        lambda: wide.setup(model, optimizer, ddp),
        lambda: bridge.update_config_with_precision_overrides(wide, model),
    ):
        with pytest.raises(ValueError, match="params_dtype=fp32 with bf16 compute"):
            attempt()
    assert (model.bf16, optimizer.bf16) == (False, False)


def test_an_unknown_attribute_is_refused_and_finalize_names_every_contradiction() -> None:
    config = bridge.MixedPrecisionConfig(fp32=True, fp8="hybrid", fp4="e2m1")
    for kind in (UnknownName, ValueError):
        with pytest.raises(kind, match="fp8_recipe"):
            config.fp8_recip = "mxfp8"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"(?s)fp8.*fp4|fp4.*fp8"):
        config.finalize()


def test_a_recipe_beyond_bridges_fields_is_not_offered() -> None:
    assert "full_bf16" not in bridge.MIXED_PRECISION_RECIPES
    with pytest.raises(ValueError, match="full_bf16"):
        bridge.get_mixed_precision_config("full_bf16")


def test_configs_recipes_and_errors_travel_to_another_process_without_install() -> None:
    code = (
        "import pickle, sys; made = pickle.load(sys.stdin.buffer); "
        "print(made[0].fp8, made[0].fp8_param_gather, made[0].params_dtype, made[1]().bf16, type(made[2]).__name__, 'megatron.bridge' in sys.modules)"
    )
    config = bridge.bf16_with_fp8_delayed_scaling_mixed()
    with pytest.raises(ValueError, match="bf17_mixed") as unknown:
        bridge.get_mixed_precision_config("bf17_mixed")
    sent = pickle.dumps((config, bridge.bf16_mixed, unknown.value))
    ran = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    assert ran.stdout.decode().split() == ["hybrid", "True", "torch.bfloat16", "True", "UnknownRecipe", "False"]
    assert copy.deepcopy(config) == config
    assert bridge.bf16_mixed is bridge.bf16_mixed is bridge.MIXED_PRECISION_RECIPES["bf16-mixed"]
    assert bridge.bf16_mixed.__name__ == "bf16_mixed"


def test_install_puts_it_under_bridges_name_once() -> None:
    code = (
        "from mpbridge.compat import megatron_bridge; megatron_bridge.install(); megatron_bridge.install()\n"
        "import sys; from importlib import import_module\n"
        "assert sys.modules['megatron.bridge.training.mixed_precision'] is megatron_bridge\n"
        "sys.modules['megatron.bridge.training.mixed_precision'] = sys\n"
        "try: megatron_bridge.install()\n"
        "except Exception as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "is already imported" in done.stdout


def test_a_notebook_cell_that_runs_again_replaces_its_own_recipe() -> None:
    code = (
        "from mpbridge import register, MixedPrecisionConfig, get_mixed_precision_config as get\n"
        "for window in (7, 9):\n"
        "    @register\n"
        "    def cell(window=window):\n"
        "        return MixedPrecisionConfig(bf16=True, hysteresis=window)\n"
        "print(get('cell').hysteresis)\n"
        "def other(): return MixedPrecisionConfig()\n"
        "try: register(name='bf16_mixed')(other)\n"
        "except Exception as error: print(type(error).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["9", "DuplicateName"]


HINTS = {"no": "fp32", "16-true": "fp16_mixed", "float8": "tensorwise", "transformer-engine": "library"}


@pytest.mark.parametrize(("word", "hint"), HINTS.items())
def test_words_of_other_stacks_are_hints_and_no_aliases(word: str, hint: str) -> None:
    with pytest.raises(UnknownName, match=hint):
        get_mixed_precision_config(word)
