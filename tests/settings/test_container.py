"""ConfigContainer and Run: what is derived, what is refused, what survives a round trip."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpbridge.common.errors import Contradiction
from mpbridge.common.facts import Versions
from mpbridge.common.formats import DType
from mpbridge.common.machines import machine
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.registry import get_mixed_precision_config, recipes, resolve
from mpbridge.precision.yaml_loader import load_yaml
from mpbridge.settings.container import ConfigContainer, Run
from mpbridge.settings.sections import Train
from mpbridge.settings.stages import emulation_faults

MODEL = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "max_sequence_length": 32, "position_embedding_type": "rope"}  # fmt: skip


def container(precision="bf16_mixed", **sections) -> ConfigContainer:
    given = {"model": MODEL, "optimizer": {"lr": 1e-3}, "train": {"train_iters": 10}}
    for name, values in sections.items():
        given[name] = given.get(name, {}) | values if isinstance(values, dict) else values
    return ConfigContainer(mixed_precision=precision, **given)


def faults(c: ConfigContainer, world_size: int = 1, **options) -> str:
    with pytest.raises(Contradiction) as caught:
        c.resolved(world_size, **options)
    return "\n".join(caught.value.faults)


def test_a_run_has_everything_decided():
    run = container().resolved(2, machine=machine("h100"), versions=Versions(torch="2.11.0"))
    assert isinstance(run, Run)
    assert (run.recipe, run.engine, run.world_size) == ("bf16_mixed", "mcore", 2)
    assert run.policy.main_params is DType.FP32
    assert run.plan.of("model")["bf16"] is True
    assert run.facts.machine.name == machine("h100").name
    assert run.facts.versions.torch == "2.11.0"
    assert run.facts.parallel.data == 2
    assert run.facts.ddp["grad_reduce_in_fp32"] is True
    assert run.facts.model["params_dtype"] == "bf16"
    assert "bf16" not in run.inputs["model"], "the recipe is not applied to the inputs"
    assert run.inputs["model"]["vocab_size"] == 320
    assert run.data["seq_length"] == 32
    assert run.scheduler["lr_decay_style"] == "linear"


def test_every_recipe_resolves_and_names_its_engine():
    for name, entry in recipes.items():
        run = container(name, model={"num_layers": 20}).resolved()
        assert run.recipe == name
        assert run.engine == (entry.engine or "mcore")


def test_the_containers_engine_is_stronger_than_the_recipes_and_megatron_fsdp_is_said_in_both_places():
    c = container("bf16_params_fp32_states")
    assert c.resolved().engine == "fsdp2"
    c.engine = "mcore"
    assert c.resolved().engine == "mcore"
    assert container("bf16_megatron_fsdp").resolved().inputs["ddp"]["use_megatron_fsdp"] is True
    assert container(ddp={"use_megatron_fsdp": True}).resolved().engine == "megatron_fsdp"


def test_a_config_object_brings_no_preferred_engine_only_a_required_one():
    made = get_mixed_precision_config
    assert container(made("bf16_megatron_fsdp")).resolved().engine == "mcore"
    assert container(made("bf16_megatron_fsdp"), engine="megatron_fsdp").resolved().engine == "megatron_fsdp"
    assert container(made("fp32_params_bf16_compute")).resolved().engine == "fsdp2"


def test_aliases_and_files_are_known_by_their_canonical_name():
    assert container("BF16-Mixed").resolved().recipe == "bf16_mixed"
    added = container({"recipe": "fp8_cs", "fp8_param": False})
    assert added.resolved().recipe == "bf16_with_fp8_current_scaling_mixed"
    assert container(MixedPrecisionConfig(bf16=True)).resolved().recipe == "custom"


@pytest.mark.parametrize(
    "wrap", [lambda path: path, lambda path: {"recipe": path}, lambda path: [{"recipe": path, "until": "50%"}, path]]
)
def test_a_recipe_file_may_be_a_path(tmp_path, wrap):
    path = tmp_path / "own.yaml"
    path.write_text("extends: bf16_mixed\ngrad_reduce_in_fp32: false\n")
    c = container(wrap(path))
    assert c == container(wrap(str(path))) == roundtrip(c)
    assert c.resolved().policy == container(wrap(str(path))).resolved().policy == resolve(path).settled()


def test_an_author_who_disagrees_is_named_in_the_plan():
    run = container(ddp={"grad_reduce_in_fp32": False}).resolved()
    (write,) = run.plan.conflicts
    assert write.set_by == "the ddp section"
    assert write.keep == "mixed_precision.grad_reduce_in_fp32=false"


def test_the_optimizer_section_settles_what_the_recipe_leaves_open():
    aware = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "use_distributed_optimizer": True}
    run = container(optimizer=aware).resolved()
    assert run.policy.exp_avg is DType.BF16
    assert run.policy.precision_aware


@pytest.mark.parametrize(
    ("sections", "world", "said"),
    [
        ({"train": {"train_iters": None}}, 1, "train.train_iters is missing"),
        ({"optimizer": {"lr": None}}, 1, "optimizer.lr is missing"),
        ({"optimizer": {"min_lr": 1.0}}, 1, "above optimizer.lr"),
        ({"model": {"window_size": [8]}}, 1, "expected two numbers"),
        ({"model": {"multi_latent_attention": True, "qk_pos_emb_head_dim": 3}}, 1, "pairs of channels"),
        ({"model": {"num_moe_experts": 4, "moe_aux_loss_coeff": [0.01]}}, 1, "moe_aux_loss_coeff is a list"),
        ({"model": {"num_moe_experts": 4, "moe_apply_probs_on_input": True}}, 1, "needs model.moe_router_topk=1"),
        ({"train": {"global_batch_size": 6}}, 1, "use a multiple of 4"),
        ({"train": {"global_batch_size": 8}}, 4, "use a multiple of 16"),
        ({"parallel": {"tensor_model_parallel_size": 2}}, 3, "3 processes cannot be divided"),
        ({"model": {"num_layers": None}}, 1, "expected a whole number"),
        ({"model": {"hidden_size": 66}}, 1, "cannot be divided into 4 attention heads"),
        ({"model": {"num_query_groups": 3}}, 1, "use a divisor of 4"),
        ({"model": {"kv_channels": 7, "position_embedding_type": "rope"}}, 1, "a head has 7"),
        ({"model": {"num_moe_experts": 2, "moe_router_topk": 4}}, 1, "moe_router_topk=4 experts per token"),
        ({"model": {"num_moe_experts": 2, "moe_layer_freq": [1]}}, 1, "1 entries for 4 layers"),
        ({"model": {"num_moe_experts": 2, "moe_layer_freq": [0, 1, 2, 1]}}, 1, "1, 2, 1]: expected 1 for each"),
        ({"model": {"window_size": [7, 0], "window_attn_skip_freq": []}}, 1, "0 entries for 4 layers"),
        ({"data": {"seq_length": 64}}, 1, "above model.max_sequence_length=32"),
        ({"data": {"tokenizer": "x:y"}}, 1, "model.vocab_size is missing"),
        ({"data": {"tokenizer": "gpt2"}}, 1, "mpbridge data inspect --tokenizer gpt2"),
        ({"model": {"vocab_size": 257}, "parallel": {"tensor_model_parallel_size": 2}}, 2, "pad it to 384"),
        ({"optimizer": {"overlap_param_gather": True}, "ddp": {"overlap_param_gather": False}}, 1, "the same setting"),
        ({"model": {"sequence_parallel": True}, "parallel": {"sequence_parallel": False}}, 1, "the same setting"),
        ({"engine": "mcroe"}, 1, "nearest: mcore"),
        ({"precision": "bf16_megatron_fsdp", "ddp": {"use_megatron_fsdp": False}}, 1, "drop one of them"),
        ({"precision": "nemotron_3_super_bf16_with_nvfp4_mixed"}, 1, "edge layers"),
        ({"precision": {"fp16": True, "bf16": True}}, 1, "mixed_precision: fp16 and bf16 are on together: keep one"),
        ({"emulate": "yes"}, 1, "expected true, false, fast or te"),
        ({"model": [1]}, 1, "model is a list"),
    ],
)
def test_what_does_not_fit_is_named_with_its_cure(sections, world, said):
    assert said in faults(container(**sections), world)


def test_all_faults_come_together():
    c = container({"recipe": "fp8_cs", "fp8_recpe": 1, "fp8": "foo"}, model={"hiden": 1}, train={"train_iters": None})
    assert len(faults(c).splitlines()) == 4


def test_a_missing_depth_and_length_are_named():
    said = faults(ConfigContainer(mixed_precision="fp32", model={"hidden_size": 8}))
    assert "model.num_layers is missing" in said
    assert "data.seq_length is missing" in said


@pytest.mark.parametrize(
    ("section", "name"),
    [("model", "num_layers"), ("model", "num_query_groups"), ("train", "train_iters"), ("optimizer", "lr"), ("train", "micro_batch_size")],
)  # fmt: skip
@pytest.mark.parametrize("value", ["four", -1])
def test_a_value_that_cannot_be_is_one_fault_and_not_missing_too(section, name, value):
    said = faults(container(**{section: {name: value}})).splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"{section}.{name}=")


def test_planning_asks_for_less_than_training():
    c = container(train={"train_iters": None}, optimizer={"lr": None})
    assert c.resolved(training=False).train["train_iters"] is None


def test_facts_with_two_homes_are_said_in_both():
    run = container(ddp={"use_distributed_optimizer": True}, parallel={"tensor_model_parallel_size": 2}).resolved(2)
    assert run.inputs["optimizer"]["use_distributed_optimizer"] is True
    assert run.inputs["model"]["tensor_model_parallel_size"] == 2
    assert run.facts.optimizer.distributed
    assert container(model={"tensor_model_parallel_size": 2}).resolved(2).facts.parallel.tensor == 2


def test_null_micro_batch_is_a_ranks_whole_share():
    c = container(train={"micro_batch_size": None, "global_batch_size": 8})
    assert [c.resolved(n).train["micro_batch_size"] for n in (1, 2, 4)] == [8, 4, 2]


@pytest.mark.parametrize(("te", "tried"), [("9.9", False), ("2.8", False), ("2.9", True), ("2.20.1", True)])
def test_a_release_that_has_not_been_tried_is_not_taken_for_another(te, tried):
    said = "has not been tried (expected 2.9 to 2.20)"
    assert any(said in fault for fault in emulation_faults(True, None, te)) is not tried


def test_emulation_shows_in_the_facts_only_where_something_is_quantized():
    assert container("fp8_cs", emulate=True).resolved().facts.realization == "emulated"
    assert container("bf16_mixed", emulate=True).resolved().facts.realization == "native"
    assert container("fp8_cs").resolved().facts.realization == "native"


def test_stages_are_accepted_and_the_first_one_begins():
    c = container([{"recipe": "fp8_cs", "until": "90%"}, {"recipe": "bf16_mixed"}])
    run = c.resolved()
    assert [stage.recipe for stage in run.stages] == ["bf16_with_fp8_current_scaling_mixed", "bf16_mixed"]
    assert [stage.until for stage in run.stages] == ["90%", None]
    assert run.policy == run.stages[0].policy


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([{"recipe": "fp8_cs"}, {"recipe": "bf16_mixed"}], "needs `until`"),
        ([{"recipe": "fp8_cs", "until": "soon"}, {"recipe": "bf16_mixed"}], "not a valid stage end"),
        ([{"recipe": "fp8_cs", "until": 99}, {"recipe": "bf16_mixed"}], "after the run's last step 10"),
        ([{"recipe": "fp8_cs", "until": 5}, {"recipe": "bf16_mixed", "until": 9}], "runs to the end"),
        ({"recipe": "fp8_cs", "until": 5}, "only the stages of a list have an end"),
        ([{"recipe": "fp8_cz", "until": 5}, "bf16_mixed"], "mixed_precision[0]: no recipe named 'fp8_cz'"),
        ([{"recipe": "bf16_megatron_fsdp", "until": 5}, "fsdp_adamw"], "different engines"),
        ([], "mixed_precision is missing"),
        (3.5, "expected a recipe's name"),
    ],
)
def test_stages_that_cannot_be(stages, said):
    assert said in faults(container(stages))


def test_the_containers_own_values_are_not_touched_by_its_runs():
    c = container()
    before = copy.deepcopy(c.as_data())
    run = c.resolved()
    run.inputs["model"]["num_layers"] = 99
    run.train["train_iters"] = 99
    assert c.as_data() == before


def test_own_sections_can_be_their_dataclasses():
    assert container(train=Train(train_iters=7)).resolved().train["train_iters"] == 7
    assert container(train=Train(train_iters=7)).as_data()["train"] == {"train_iters": 7}


def test_a_run_can_be_copied_and_sent_to_another_process():
    run = container({"recipe": "fp8_cs", "modules": {"mlp.linear_fc2": "bf16"}}).resolved()
    again = pickle.loads(pickle.dumps(run))
    assert again.policy == run.policy
    assert copy.deepcopy(run).facts == run.facts


def roundtrip(c: ConfigContainer) -> ConfigContainer:
    return ConfigContainer(**load_yaml(c.to_yaml()))


def test_a_dump_loads_back_to_an_equal_container(tmp_path):
    c = container(
        {"recipe": "fp8_cs", "exp_avg_dtype": torch.bfloat16, "keep_fp32": ("*.norm*",), "modules": {"mlp.linear_fc2": {"fp8": "hybrid"}}},
        model={"params_dtype": torch.float16, "activation_func": torch.nn.functional.silu, "window_size": (4, 0), "layernorm_epsilon": 1e-6},
        engine="mcore", emulate=True,
    )  # fmt: skip
    c.dump(tmp_path / "c.yaml")
    again = ConfigContainer.load(tmp_path / "c.yaml")
    assert again == c
    assert (again.engine, again.emulate) == ("mcore", True)
    assert again.as_data() == c.as_data()
    assert again.resolved().policy == c.resolved().policy
    assert [write.name for write in again.resolved().plan.writes] == [write.name for write in c.resolved().plan.writes]


def test_a_config_object_dumps_as_its_fields():
    c = container(MixedPrecisionConfig(bf16=True, params_dtype=torch.bfloat16, fp8="hybrid"))
    assert roundtrip(c) == c
    assert roundtrip(c).resolved().policy == c.resolved().policy
    plain = container(MixedPrecisionConfig())
    assert roundtrip(plain) == plain
    assert roundtrip(plain).resolved().policy == plain.resolved().policy


RULES = ("*.linear_qkv", "*.linear_proj", "*mlp.fc[12]_latent_proj", "mtp.*", "*mixer.out_proj")
"""nemotron_3_super's, by te_quant.cfg of Megatron Bridge."""


def test_rules_of_a_recipe_that_modules_replaces_are_named(tmp_path):
    name = "nemotron_3_super_bf16_with_nvfp4_mixed"
    file = tmp_path / "mine.yaml"
    file.write_text(f'extends: {name}\nmodules: {{"*.linear_fc1": bf16, "*.linear_proj": bf16, "mtp.*": mxfp8}}\n')
    gone = [glob for glob in RULES if glob not in ("*.linear_proj", "mtp.*")]  # what is stated again is not missed
    given = {"*.linear_fc1": "bf16", "*.linear_proj": "bf16", "mtp.*": "mxfp8"}
    for precision in (str(file), {"recipe": name, "modules": given}):
        (said,) = container(precision, model={"num_layers": 32}).resolved(training=False).replaced
        assert f"'s rules for {', '.join(gone)} are replaced" in said
    assert container(name, model={"num_layers": 32}).resolved(training=False).replaced == ()


def test_what_no_file_can_hold_is_named_by_the_dump():
    with pytest.raises(Contradiction, match=r"model\.activation_func=.*Python object"):
        container(model={"activation_func": lambda x: x}).to_yaml()


def some(**values):
    return st.fixed_dictionaries({}, optional=values)


SECTION_VALUES = some(
    optimizer=some(lr=st.floats(0, 1), clip_grad=st.floats(0, 1e6), exp_avg_dtype=st.sampled_from(["bf16", "torch.float32"])),
    ddp=some(bucket_size=st.none() | st.integers(1), overlap_grad_reduce=st.booleans()),
    data=some(corpus=st.text() | st.lists(st.text()), json_key=st.text()), logger=some(log_dir=st.none() | st.text()),
    mixed_precision=st.sampled_from(["bf16_mixed", "16", "fp8_cs", {"recipe": "fp32", "loss_scale": 2.0}, {"bf16": True}]),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(SECTION_VALUES)
@example({"data": {"corpus": "0E0"}})
def test_every_dump_loads_back(values):
    c = ConfigContainer(**values)
    assert roundtrip(c) == c


YARN = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64, "position_embedding_type": "yarn",
    "yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rotary_percent": 0.5}, "model.rotary_percent=0.5: megatron-core's YaRN does not support it"),
        ({"rope_scaling": True}, "model.rope_scaling=True: megatron-core's YaRN does not support it"),
        ({"yarn_beta_fast": 1}, "model.yarn_beta_fast=1: expected more than model.yarn_beta_slow=1"),
        ({"yarn_rotary_scaling_factor": None}, "model.yarn_rotary_scaling_factor is missing"),
        ({"multi_latent_attention": True}, "latent attention, which takes model.rope_type=yarn"),
        ({"position_embedding_type": "rope"}, "only read with model.position_embedding_type=yarn"),
    ],
)
def test_yarn_that_megatron_core_would_not_compute_is_refused(change: dict[str, Any], said: str) -> None:
    config = ConfigContainer(mixed_precision="bf16_mixed", model=YARN, data={"seq_length": 32})
    assert config.resolved(training=False).facts.model["position_embedding_type"] == "yarn"
    for name, value in change.items():
        setattr(config.model, name, value)
    with pytest.raises(Contradiction) as refused:
        config.resolved(training=False)
    assert said in str(refused.value)
