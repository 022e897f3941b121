"""What is said where Transformer Engine is missing, incomplete, unknown or asked to play something that does not exist. Needs no wheel."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mpbridge import ConfigContainer, transformer_engine_on_cpu
from mpbridge.cli.main import with_way
from mpbridge.common import transformer_engine as packages
from mpbridge.common.errors import Contradiction, Refused, UnknownName
from mpbridge.common.machines import machine
from mpbridge.common.upstream import Guard
from tests.forked import forked

ROOT = Path(__file__).resolve().parents[2]


def wheel(folder: Path, version: str) -> Path:
    """A pure-Python Transformer Engine that dies when it is imported, as NVIDIA's does without its CUDA parts."""
    (folder / "transformer_engine").mkdir(parents=True)
    (folder / "transformer_engine/__init__.py").write_text("raise RuntimeError('Found empty meta package')\n")
    metadata = folder / f"transformer_engine-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {version}\n")
    return folder


@pytest.fixture
def nowhere(monkeypatch):
    """No Transformer Engine anywhere."""
    monkeypatch.delenv(packages.VARIABLE, raising=False)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **given: [])


def test_no_transformer_engine_names_the_line_that_installs_it(nowhere) -> None:
    with pytest.raises(Refused, match=r"pip install -e '\.\[te-cpu\]'"), transformer_engine_on_cpu("h100"):
        pass


def test_an_unknown_machine_and_a_cpu_cannot_be_played(tmp_path) -> None:
    with pytest.raises(UnknownName, match="h100"), transformer_engine_on_cpu("h10"):
        pass
    with pytest.raises(UnknownName), transformer_engine_on_cpu("cpu"):
        pass
    assert not torch.cuda.is_available()


def test_beside_a_gpu_it_plays_only_if_asked(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    folder = wheel(tmp_path, "2.21.0")
    refusal = r"this machine has a GPU \(NVIDIA H100 80GB HBM3\).*beside_a_gpu=True to play B200"
    with pytest.raises(Refused, match=refusal), transformer_engine_on_cpu("b200", where=[folder]):
        pass
    assert not [name for name in sys.modules if name.startswith("transformer_engine")]
    # asked for, it gets as far as the release
    asked = transformer_engine_on_cpu("b200", te="2.21", where=[folder], beside_a_gpu=True)
    with pytest.raises(Refused, match=r"2\.21\.0 is not in the table"), asked:
        pass


def test_a_release_outside_of_the_table_is_refused(tmp_path) -> None:
    with pytest.raises(Refused, match=r"9\.9\.0 is not in the table of releases \(expected 2\.11 to 2\.20\)"):
        packages.choose("9.9", [wheel(tmp_path / "a", "9.9.0")])
    with pytest.raises(Refused, match=r"2\.21 is not in the table of releases"):
        packages.choose("2.21", [tmp_path / "a"])
    with pytest.raises(Refused, match=r"2\.13 is not installed .*'transformer-engine==2\.13\.\*', and add FOLDER"):
        packages.choose("2.13", [tmp_path / "a"])
    found = packages.choose("2.12", [tmp_path / "a", wheel(tmp_path / "b", "2.12.0")])
    assert (found.version, found.release, found.complete) == ("2.12.0", (2, 12, 0), False)


def printed(code: str) -> str:
    """By a process of its own that has imported megatron-core."""
    with forked(exec, code, {}) as process:
        assert process.wait() == 0, process.text
    return process.text


def test_an_incomplete_wheel_is_no_transformer_engine(tmp_path) -> None:
    folder = wheel(tmp_path, "2.11.0")
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); import mpbridge\n"
        "try:\n    import transformer_engine\nexcept ModuleNotFoundError as error:\n    print(error)\n"
        "from mpbridge.common.probe import installed\nprint(installed().transformer_engine)\n"
        "import megatron.core.extensions.transformer_engine as found\nprint(found.HAVE_TE)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=840, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "has no CUDA parts" in done.stdout
    assert done.stdout.split()[-2:] == ["None", "False"]


def test_a_complete_one_is_left_alone(tmp_path, monkeypatch) -> None:
    folder = wheel(tmp_path, "2.11.0")
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(ModuleNotFoundError, match="has no CUDA parts"):
        Guard().find_spec("transformer_engine")
    (folder / "transformer_engine_torch.cpython-311-x86_64-linux-gnu.so").touch()
    assert Guard().find_spec("transformer_engine") is None
    assert Guard().find_spec("transformer_engine.pytorch", [str(folder)]) is None


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"emulate": "yes"}, "expected true, false, fast or te"),
        ({"target": "b200"}, "target=b200 without emulate=te"),
        ({"emulate": "te", "target": "cpu"}, "expected a GPU"),
        ({"emulate": "te", "te": "two"}, "two"),
        ({"emulate": "te", "te": 2.2}, "write it in quotes"),
    ],
)
def test_settings_that_do_not_fit_are_faults(settings, fault) -> None:
    assert any(fault in found for found in ConfigContainer(mixed_precision="bf16_mixed", **settings).faults())


def test_a_run_without_the_package_is_a_fault_of_the_configuration(nowhere) -> None:
    importlib.import_module("mpbridge.settings.stages").package.cache_clear()
    config = ConfigContainer.load(ROOT / "configs/gpt_tiny.yaml", ["emulate=te"])
    with pytest.raises(Contradiction, match=r"\.\[te-cpu\]"):
        config.resolved()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--emulate", "train.train_iters=3"], ["--emulate=fast", "train.train_iters=3"]),
        (["--emulate", "te", "--target", "b200"], ["--emulate=te", "--target", "b200"]),
        (["a=b", "--emulate"], ["a=b", "--emulate=fast"]),
        (["--emulate=te"], ["--emulate=te"]),
    ],
)
def test_emulate_takes_what_it_took(given, meant) -> None:
    assert with_way(given) == meant


def test_megatron_imported_first_is_one_clear_refusal(tmp_path) -> None:
    code = (
        f"import mpbridge, megatron.core\n"
        f"try:\n    mpbridge.transformer_engine_on_cpu('h100', where=[{str(wheel(tmp_path, '2.11.0'))!r}]).__enter__()\n"
        "except mpbridge.MpbridgeError as error:\n    print(error)\n"
        "import sys\nassert not [name for name in sys.modules if name.startswith('transformer_engine')]\n"
    )
    assert "megatron is already imported" in printed(code)


def test_coalesced_gathers_keep_every_dtype() -> None:
    """In a process of its own: it needs a process group."""
    code = """
import torch, torch.distributed as dist
from mpbridge.backend.devices.collectives import one_by_one
dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
codes, values = torch.tensor([1, 255, 7, 129], dtype=torch.uint8), torch.tensor([0.5, -0.02, 0.03, 1.0]).bfloat16()
for first, second in ((codes, values), (values, codes)):
    for async_ops in (False, True):
        a, b = torch.zeros_like(first), torch.zeros_like(second)
        with one_by_one(dist.group.WORLD, async_ops=async_ops) as pending:
            dist.all_gather_into_tensor(a, first, group=dist.group.WORLD)
            dist.all_gather_into_tensor(b, second, group=dist.group.WORLD)
        pending.wait()
        assert torch.equal(a, first) and torch.equal(b, second), (a, b)
total = torch.ones(3)
with one_by_one():
    dist.all_reduce(total)
assert total.tolist() == [1, 1, 1]
dist.destroy_process_group()  # its threads end before the interpreter does
"""
    printed(code)


def test_generators_stay_a_class_that_libraries_can_annotate_with() -> None:
    import torch

    from mpbridge.te_cpu.cuda_names import _generator

    played = _generator(torch.Generator)
    made = played("cuda")
    assert isinstance(made, torch.Generator)
    assert isinstance(made, played)
    assert isinstance(torch.Generator(), played | None)
    assert not isinstance(1, played)


def test_a_process_has_another_port_than_the_one_that_its_parent_made_up(monkeypatch) -> None:
    from mpbridge.te_cpu import played as stage
    from mpbridge.te_cpu.foreign import foreign_code

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("mpbridge.te_cpu.foreign._stand_in_for_triton", list)  # an import of seconds
    monkeypatch.setattr(stage, "_now", [stage.Played(machine=machine("h100"), release=(2, 11, 0))])
    before, parent = dict(os.environ), os.getpid()
    with foreign_code():
        inherited = os.environ["MASTER_PORT"]
        with foreign_code():
            assert os.environ["MASTER_PORT"] == inherited, "one process, one port"
        monkeypatch.setattr(os, "getpid", lambda: parent + 1)
        with foreign_code():
            assert os.environ["MASTER_PORT"] != inherited
        assert os.environ["MASTER_PORT"] == inherited
        with foreign_code(own_port=False):
            assert os.environ["MASTER_PORT"] == inherited, "a process that the script spawns may be a rank of its world"
        os.environ["WORLD_SIZE"] = "2"
        with foreign_code():
            assert os.environ["MASTER_PORT"] == inherited, "a rank of the parent's world"
        os.environ |= {"WORLD_SIZE": "1", "MASTER_PORT": "4321"}
        with foreign_code():
            assert os.environ["MASTER_PORT"] == "4321", "a launcher's"
        assert os.environ["MASTER_PORT"] == "4321"
    assert dict(os.environ) == before


CLOSED_APEX = """
import sys
from mpbridge.te_cpu import foreign
foreign._stand_in_for_triton = list  # an import of seconds
with foreign.foreign_code():
    sys.modules["apex"] = None
    from megatron.core.models.bert import bert_lm_head
    from megatron.core.models.gpt import gpt_layer_specs
    print(bert_lm_head.LNImpl.__name__, gpt_layer_specs.LNImpl.__name__)
print(sys.modules["apex"])
"""


def test_a_script_that_closes_apex_has_torchs_norms() -> None:
    """The language model's layers ask for `apex`, BERT's head for the class alone."""
    command = [sys.executable, "-W", "ignore", "-c", CLOSED_APEX]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split() == ["WrappedTorchNorm", "WrappedTorchNorm", "None"], done.stderr[-2000:]


def test_apex_that_was_closed_before_stays_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By sitecustomize or a conftest."""
    from mpbridge.te_cpu.foreign import foreign_code

    monkeypatch.setattr("mpbridge.te_cpu.foreign._stand_in_for_triton", list)
    monkeypatch.setitem(sys.modules, "apex", None)
    with foreign_code():
        for name in ("apex", "apex.normalization", "apex.normalization.fused_layer_norm"):
            with pytest.raises(ModuleNotFoundError):
                importlib.import_module(name)
    assert sys.modules["apex"] is None


def test_apex_goes_with_the_block_and_an_installed_one_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mpbridge.te_cpu.foreign import foreign_code

    def loaded() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in ("apex", "fused_weight_gradient_mlp_cuda")]

    monkeypatch.setattr("mpbridge.te_cpu.foreign._stand_in_for_triton", list)
    with foreign_code():
        importlib.import_module("apex.normalization.fused_layer_norm")
        importlib.import_module("fused_weight_gradient_mlp_cuda")
        assert len(loaded()) == 4
    assert loaded() == []
    assert importlib.util.find_spec("apex") is None
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with foreign_code():
        theirs = importlib.import_module("apex")
        assert theirs.__file__ == str(tmp_path / "apex/__init__.py")
        with pytest.raises(ModuleNotFoundError, match=r"apex\.normalization"):
            importlib.import_module("apex.normalization")
    assert sys.modules.pop("apex") is theirs
