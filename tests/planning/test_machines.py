from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from mpbridge.common import probe
from mpbridge.common.errors import Refused
from mpbridge.common.facts import Versions
from mpbridge.common.machines import Machine, like, machine, machines
from mpbridge.common.versions import Window, at_least
from mpbridge.planning.capability import ASSUMED, can_run, refuse_unless_native
from mpbridge.precision.registry import recipes
from mpbridge.precision.resolve import resolve

TE_211 = Versions(torch="2.11.0", megatron_core="0.16.1", transformer_engine="2.11.0", cuda="12.9")


def policy(name):
    return resolve(recipes[name].make())


@pytest.mark.parametrize("row", machines.values(), ids=lambda row: row.name)
def test_every_machine_has_its_papers(row):
    assert row.source
    if not row.gpu:
        return
    peaks = dict(row.peak)
    assert row.memory_bytes >= 16e9
    assert row.bandwidth >= 300e9
    # a format exists where the tensor cores have it, and narrower is never slower
    assert ("bf16" in peaks) == (row.arch >= (8, 0))
    assert ("fp8" in peaks) == (row.arch >= (8, 9))
    assert ("fp4" in peaks) == (row.arch >= (10, 0))
    order = [peaks[f] for f in ("fp32", "fp16", "fp8", "fp4") if f in peaks]
    assert order == sorted(order)


# scaling family x architecture, as "Datatype and hardware support matrix" of Transformer Engine's documentation has it
FAMILIES = ("bf16", "fp8_ds", "fp8_cs", "fp8_sc", "mxfp8", "nvfp4")
NATIVE = {
    "A100": FAMILIES[:1], "L4": FAMILIES[:3], "H100": FAMILIES[:4], "B200": FAMILIES, "B300": FAMILIES,
    "RTX 5090": (*FAMILIES[:4], "nvfp4"), "CPU": FAMILIES[:1],
}  # fmt: skip
MATRIX = {gpu: dict.fromkeys(FAMILIES, "emulated") | dict.fromkeys(native, "native") for gpu, native in NATIVE.items()}
MATRIX["CPU"]["fp16"] = "native"
MATRIX["V100"] = {"bf16": "no", "fp8_cs": "no", "fp16": "native", "fp32": "native"}


@pytest.mark.parametrize(("gpu", "name", "how"), [(g, n, h) for g, row in MATRIX.items() for n, h in row.items()])
def test_support_matrix(gpu, name, how):
    answer = can_run(policy(name), machine(gpu), TE_211)
    assert (answer.how, bool(answer)) == (how, how != "no"), answer.reason


def test_blockwise_on_hopper_needs_cuda_12_9_and_compares_versions_as_numbers():
    old, new, ten = (Versions(transformer_engine="2.11.0", cuda=c) for c in ("12.8", "12.9", "12.10"))
    assert can_run(policy("fp8_sc"), machine("h100"), old).nearest == "bf16_with_fp8_current_scaling_mixed"
    assert "12.8" in can_run(policy("fp8_sc"), machine("h100"), old).reason
    assert can_run(policy("fp8_sc"), machine("h100"), new).native
    assert can_run(policy("fp8_sc"), machine("h100"), ten).native


def test_blockwise_on_blackwell_says_that_it_runs_as_mxfp8():
    assert "MXFP8" in can_run(policy("fp8_sc"), machine("b200"), TE_211).reason


def test_sm120_is_reported_and_unproven():
    answer = can_run(policy("nvfp4"), machine("rtx-5090"), TE_211)
    assert answer.native
    assert not answer.proven
    assert "unproven" in answer.reason
    assert "STOCHASTIC_ROUNDING" in answer.reason
    assert can_run(policy("nvfp4"), machine("gb200"), TE_211).proven


@pytest.mark.parametrize(("name", "gpu", "te", "nearest"), [
    ("mxfp8", "h100", "2.11.0", "bf16_with_fp8_subchannel_scaling_mixed"), ("nvfp4", "b200", "2.6.0", "bf16_with_mxfp8_mixed"),
    ("mxfp8", "rtx5090", "2.11.0", "bf16_with_fp8_subchannel_scaling_mixed"), ("fp8_ds", "h100", None, "bf16_mixed"),
    ("fp16_with_mxfp8_mixed", "h200", "2.11.0", "fp16_with_fp8_subchannel_scaling_mixed"),
    ("bf16", "v100", "2.11.0", "fp16_mixed"), ("bf16", "h100", "2.11.0", None),
])  # fmt: skip
def test_nearest_legal_recipe(name, gpu, te, nearest):
    answer = can_run(policy(name), machine(gpu), Versions(transformer_engine=te, cuda="12.9"))
    assert answer.nearest == nearest
    if nearest:
        assert can_run(policy(nearest), machine(gpu), Versions(transformer_engine=te, cuda="12.9")).native


def test_missing_transformer_engine_is_said_and_emulation_offered():
    answer = can_run(policy("fp8_cs"), machine("h100"), Versions(cuda="12.9"))
    assert (answer.how, answer.nearest) == ("emulated", "bf16_mixed")
    assert "not installed" in answer.reason
    assert can_run(policy("fp8_cs"), machine("h100"), Versions(), quantized_by="emulation").how == "emulated"


def test_custom_recipes_cannot_be_emulated():
    config = recipes["bf16"].make().derive(fp8="hybrid", fp8_recipe="custom", fp8_quantizer_factory="a.b")
    assert can_run(resolve(config), machine("cpu"), TE_211).how == "no"
    assert can_run(resolve(config), machine("h100"), TE_211).native


def test_fp8_attention_needs_hopper():
    config = recipes["fp8_ds"].make().derive(fp8_dot_product_attention=True)
    assert can_run(resolve(config), machine("l40s"), TE_211).how == "emulated"
    assert can_run(resolve(config), machine("h200"), TE_211).native


def test_ada_needs_its_cublaslt():
    for cublaslt, native in (("12.1.1", False), ("12.1.3.1", True)):
        versions = Versions(transformer_engine="2.11.0", cuda="12.9", cublaslt=cublaslt)
        assert can_run(policy("fp8_cs"), machine("l4"), versions).native is native


def test_refusal_is_one_paragraph_with_the_way_out():
    with pytest.raises(Refused) as raised:
        refuse_unless_native(policy("mxfp8"), machine("h100"), ASSUMED)
    text = str(raised.value)
    assert raised.value.exit_code == 1
    assert "\n" not in text
    for part in ("MXFP8", "10.0", "9.0", "bf16_with_fp8_subchannel_scaling_mixed", "--emulate"):
        assert part in text
    assert refuse_unless_native(policy("bf16"), machine("cpu"), Versions()).native


def test_a_played_machine_that_cannot_run_a_recipe_names_one_that_can():
    said = "--target b200 plays a machine that does"
    for name in ("mxfp8", "nvfp4"):
        with probe.playing(machine("h100"), ASSUMED), pytest.raises(Refused, match=said):
            refuse_unless_native(policy(name), machine("h100"), ASSUMED)


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A10", "A10"), ("NVIDIA A10G", None), ("NVIDIA GB200", "GB200"), ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("Tesla V100-SXM2-32GB", "V100"), ("NVIDIA RTX A6000", None), ("NVIDIA GH200 480GB", "GH200"),
    ],
)  # fmt: skip
def test_driver_names_find_their_row(product, name):
    found = like(product)
    assert (found and found.name) == name


def test_a_driver_report_outranks_the_table(monkeypatch):
    report = "NVIDIA H200, 143771, 9.0\nNVIDIA Weird 1, [N/A], 10.0\ngarbage\n"
    monkeypatch.setattr(probe, "_nvidia_smi", lambda *a: report)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first, second = probe.gpus.__wrapped__()
    assert (first.name, first.arch, first.memory_bytes) == ("H200", (9, 0), 143771 * 2**20)
    assert first.flops("fp8") == 1979e12
    assert (second.name, second.arch, second.memory_bytes) == ("NVIDIA Weird 1", (10, 0), 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.name for gpu in probe.gpus.__wrapped__()] == ["NVIDIA Weird 1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert probe.gpus.__wrapped__() == ()


def test_probing_finds_what_is_installed_without_importing_it():
    code = (
        "import sys; from mpbridge.common.probe import installed, this_machine, gpus; v = installed(); this_machine(); gpus();"
        "print(v.torch, v.megatron_core, sorted({'torch', 'megatron', 'transformer_engine'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    import megatron.core
    import torch

    found, core, loaded = done.stdout.split()
    # a wheel's metadata need not have the local part
    assert found.partition("+")[0] == torch.__version__.partition("+")[0]
    assert (core, loaded) == (megatron.core.__version__, "[]")
    assert probe.installed().cuda == torch.version.cuda


def test_version_windows():
    assert at_least("2.11", "2.11.0")
    assert not at_least("2.9", "2.10")
    assert not at_least(None, "1.0")
    window = Window(package="megatron_core", until="0.17")
    assert window.holds("0.16.1")
    assert window.holds(None)
    assert not window.holds("0.17.0")


def test_machines_are_plain_records():
    assert hash(Machine(name="x", arch=(9, 0))) == hash(Machine(name="x", arch=(9, 0)))
    assert machine("sm_100").name == "B200"


def test_usable_memory_is_what_torch_reports_and_says_where_it_is_from():
    assert machine("h100").memory_bytes == int(79.65 * 2**30)
    assert machine("b200").memory_bytes == int(178.35 * 2**30)
    for name, gib in {"gb200": 185, "b300": 269, "gb300": 278}.items():
        assert machine(name).memory_bytes / 2**30 == pytest.approx(gib, abs=1)
        assert "inference" in machine(name).memory_source
    assert all(row.memory_source for row in machines.values() if row.gpu)


def test_links_are_the_machines_own():
    assert (machine("h100").domain, machine("gb200").domain) == (8, 72)
    assert machine("h100").nvlink * 2 == machine("b200").nvlink == 900e9
    assert machine("rtx4090").network == 0
    for row in machines.values():
        if row.gpu:
            assert row.nvlink > row.network
            assert row.multiprocessors >= 40
            assert row.link_source


@pytest.mark.parametrize(("installed", "native"), [("2.11.0", False), ("2.16.1", False), ("2.17.0", True)])
def test_an_option_of_a_recipe_needs_the_release_that_brought_it(installed: str, native: bool) -> None:
    from mpbridge.precision.config import MixedPrecisionConfig

    config = MixedPrecisionConfig(bf16=True, fp4="e2m1", fp4_options={"four_over_six": "weights"})
    versions = dataclasses.replace(ASSUMED, transformer_engine=installed)
    answer = can_run(resolve(config), machine("b200"), versions)
    said = f"four_over_six of NVFP4 needs Transformer Engine 2.17 or later, found {installed}"
    assert answer.native is native
    assert native or said in answer.reason


@pytest.mark.parametrize(("given", "below"), [("20000 60999", True), ("1024 65535", False), (None, True)])
def test_a_port_to_meet_at_is_none_that_the_kernel_gives_out_while_others_are_left(
    monkeypatch: pytest.MonkeyPatch, given: str | None, below: bool
) -> None:
    if given is not None:
        monkeypatch.setattr(probe.Path, "read_text", lambda *a, **k: given)
    ports = {probe.free_port() for _ in range(50)}
    assert len(ports) > 25, "not one after the other"
    low, high = map(int, (given or Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()).split())
    assert below == all(not low <= port <= high for port in ports)
