"""Fuzzes the readers of files from untrusted sources, guided by coverage: python scripts/evidence/fuzz_readers.py READER[,READER...]|all [SECONDS] [OUT].

Needs atheris (pip install atheris). A reader may refuse its input with an MpbridgeError; any other exception, two seconds of time or a gigabyte of memory is a
finding. OUT keeps each reader's corpus, from which the next run goes on, one input of each finding (by exception and line), and in seconds.jsonl what each reader cost.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

READERS: Mapping[str, tuple[str, str, tuple[bytes, ...]]] = {
    "recipe": ("recipe.yaml", "registry.get_mixed_precision_config(str(file), code=False)", (b"extends: bf16_mixed\nfp8: hybrid\n",)),
    "run": ("run.yaml", "container.ConfigContainer.load(file).resolved(1)", (b"model: {num_layers: 2, hidden_size: 64}\nmixed_precision: bf16_mixed\n",)),
    "metrics": ("metrics.jsonl", "curves.read_curves(file.parent)", (b'{"iteration": 1, "loss": 3.0, "grad_norm": "nan"}\n',)),
    "audits": ("precision.json", "curves.read_history(file.parent)", (b'{"audit": {"history": [{"step": 1, "ok": true, "facts": {"a": ["b", "c", "ok"]}}]}}',)),
    "safetensors": ("model.safetensors", "folder.tensors(file.parent)", (b'\x40\0\0\0\0\0\0\0{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}          \0\0',)),
    "huggingface": ("config.json", "section.model_section(file.parent)", (
        b'{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "intermediate_size": 128}',
        b'{"model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 2, "rope_scaling": {"type": "yarn", "factor": 4}, "n_routed_experts": 8}')),
    "pickle": ("data.pkl", "safe_unpickler.read(file.read_bytes(), safe_unpickler.any_call)", (b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01K\x01s.",)),
    "archive": ("common.pt", "archive.spelled(archive.load(archive.BytesIO(file.read_bytes()), 0, file.stat().st_size))", ()),
    "metadata": (".metadata", "converter_process._metadata(file)", (b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(X\x13\x00\x00\x00state_dict_metadata}X\x0c\x00\x00\x00storage_data}ub.",)),
    "arguments": ("model_optim_rng.pt", "importers.read_file(file)", ()),
    "index": ("index.json", "format.read_index(file.parent, {'a': {'bytes': 64}})", (b'{"schema": 1, "files": ["a"], "tensors": {"w": {"dtype": "float32", "shape": [4], "pieces": [[0, 0, [0], [4]]]}}, "objects": {"o": [0, 16, 8]}}',)),
    "state": ("state.json", "continuation.read_state(file.parent)", (b'{"map": [["a", 1], ["b", {"tuple": [1, 2]}]]}',)),
    "manifest": ("manifest.json", "store.read_manifest(file.parent)", (b'{"schema": 3, "files": {"a": {"bytes": 1, "sha256": "00"}}}',)),
    "script": ("train.sh", "importers.read_file(file)", (
        b'#!/bin/bash\nARGS=(--bf16 --fp8-format hybrid)\nif [ "${X:-1}" = 1 ]; then ARGS+=(--use-distributed-optimizer); fi\ntorchrun pretrain_gpt.py ${ARGS[@]}\n',
        b"for i in 1 2; do A=\"$A --num-layers $i\"; done\n[[ $A =~ x ]] && B=${A//2/3}\npython pretrain_gpt.py $A $B --bf16\n")),
    "arguments in words": ("words.txt", "importers.read_args(file.read_text(errors='replace'))", (b"torchrun --nproc-per-node 8 pretrain_gpt.py --bf16 --fp8-format e4m3 --lr 1e-4",)),
    "stack YAML": ("config.yaml", "importers.read_file(file)", (
        b"trainer: {precision: bf16-mixed, devices: 8}\n", b"mixed_precision: bf16\nfsdp_config: {fsdp_version: 2}\n", b"MODEL_ARGS: {--bf16: true}\n",
        b"model: {num_layers: 2, bf16: true}\nmixed_precision: bf16_mixed\nddp: {grad_reduce_in_fp32: true}\n", b"distributed: {strategy: fsdp2}\nmodel: {_target_: nemo_automodel.X, torch_dtype: bf16}\n")),
    "stack JSON": ("ds_config.json", "importers.read_file(file)", (b'{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}, "train_batch_size": 8}', b'{"bf16": true, "fsdp": "full_shard", "optim": "adamw_torch"}')),
    "stack TOML": ("job.toml", "importers.read_file(file)", (b'[training]\nmixed_precision_param = "bfloat16"\n[model]\nconverters = ["float8"]\n',)),
    "stack Python": ("config_registry.py", "importers.read_file(file)", (
        b"from torchtitan.trainer import Trainer\ndef llama(x=1):\n    a = Trainer.Config(training=TrainingConfig(steps=10, **{'dtype': 'bf16'}))\n    a.b = [i for i in range(3)]\n    return a\n",
        b"from megatron.bridge.training.config import ConfigContainer\ndef recipe() -> ConfigContainer:\n    cfg = ConfigContainer(model=M(num_layers=2), mixed_precision='bf16_mixed')\n    return cfg\n")),
}  # fmt: skip
"""Reader -> the name of its file, the call, and inputs to start from."""
SLOW = 2.0
"""Seconds after which an input of 4096 bytes is a finding; instrumented code is several times slower than the reader."""


def archives() -> tuple[bytes, bytes]:
    """What torch.save writes of {"a": a tensor}, and of {"args": Namespace(bf16=True)}, made without torch."""
    tensor = (
        b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01ctorch._utils\n_rebuild_tensor_v2\nq\x02((X\x07\x00\x00\x00storageq\x03ctorch\nFloatStorage\nq\x04"
        b"X\x01\x00\x00\x000q\x05X\x03\x00\x00\x00cpuq\x06K\x02tq\x07QK\x00K\x02\x85q\x08K\x01\x85q\x09\x89ccollections\nOrderedDict\nq\x0a)Rq\x0btq\x0cRq\x0ds."
    )
    space = b"\x80\x02}q\x00X\x04\x00\x00\x00argsq\x01cargparse\nNamespace\nq\x02)\x81q\x03}q\x04(X\x04\x00\x00\x00bf16q\x05\x88X\x02\x00\x00\x00lrq\x06G?\x50\x62\x4d\xd2\xf1\xa9\xfcubs."
    made = []
    for data in (tensor, space):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("archive/data.pkl", data)
            archive.writestr("archive/data/0", b"\0" * 8)
        made.append(stream.getvalue())
    return made[0], made[1]


def reader_of(name: str) -> Callable[[Path], object]:
    """The call of a reader, on a file of its name. Imports what it calls."""
    from mpbridge.common import safe_unpickler
    from mpbridge.common.report import curves
    from mpbridge.interop.stacks import importers
    from mpbridge.precision import registry
    from mpbridge.settings import container
    from mpbridge.settings.huggingface import folder, section
    from mpbridge.training.checkpoint import archive, continuation, converter_process, format, store

    modules = (safe_unpickler, curves, importers, registry, container, folder, section, archive, continuation, converter_process, format, store)  # fmt: skip
    found: Callable[[Path], object] = eval(f"lambda file: {READERS[name][1]}", {one.__name__.rpartition(".")[2]: one for one in modules})  # fmt: skip
    return found


def fuzz(name: str, seconds: int, out: Path) -> None:
    """One reader in this process; ends it."""
    import atheris

    with atheris.instrument_imports(include=["mpbridge"]):
        from mpbridge.common.errors import MpbridgeError

        reader = reader_of(name)
    file_name, _, seeds = READERS[name]
    corpus = out / "corpus" / name.replace(" ", "-")
    corpus.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(seeds or archives()):
        (corpus / f"seed{number}").write_bytes(start)
    file = Path(tempfile.mkdtemp(prefix="fuzz.")) / file_name

    def once(data: bytes) -> None:
        file.write_bytes(data)
        begun, found = time.process_time(), None
        with contextlib.suppress(MpbridgeError):
            try:
                reader(file)
            except MpbridgeError:
                raise
            except Exception as error:
                place = next((one for one in reversed(traceback.extract_tb(error.__traceback__)) if "mpbridge/" in one.filename), None)  # fmt: skip
                found = f"{type(error).__name__}-{Path(place.filename).name}-{place.lineno}" if place else type(error).__name__  # fmt: skip
        if found is None and time.process_time() - begun > SLOW:
            found = "slow"
        if found:
            kept = out / "findings" / f"{name.replace(' ', '-')}.{found}"
            if not kept.exists() or kept.stat().st_size > len(data):
                kept.parent.mkdir(exist_ok=True)
                kept.write_bytes(data)

    options = [f"-max_total_time={seconds}", "-timeout=20", "-rss_limit_mb=1536", "-max_len=4096", f"-artifact_prefix={out}/{name.replace(' ', '-')}-"]  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(corpus)], once)
    atheris.Fuzz()


def main() -> int:
    """Each reader in a process of its own, since libFuzzer ends its process; what it cost is written down however it ends."""
    if sys.argv[1:2] == ["--one"]:
        fuzz(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    names, seconds, place = (sys.argv[1:] + ["60", "fuzzed"][len(sys.argv) - 2 :])[:3]
    out = Path(place)
    out.mkdir(parents=True, exist_ok=True)
    for name in list(READERS) if names == "all" else names.split(","):
        begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        ended = subprocess.run([sys.executable, __file__, "--one", name, seconds, place], stderr=subprocess.PIPE, text=True, errors="replace", check=False)  # fmt: skip
        after, runs = resource.getrusage(resource.RUSAGE_CHILDREN), re.findall(r"^Done (\d+) runs", ended.stderr, re.M)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        row = {"reader": name, "seconds": round(time.monotonic() - begun), "cpu": round(used), "inputs": int((runs or [0])[-1]), "ended": ended.returncode}  # fmt: skip
        with (out / "seconds.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        if ended.returncode:
            print(name, ended.stderr[-2000:], sep=": ")
    findings = sorted(one.name for one in (out / "findings").iterdir()) if (out / "findings").exists() else []
    print("\n".join(findings) or "nothing was found")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
