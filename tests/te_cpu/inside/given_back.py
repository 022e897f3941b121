"""Run as a script: everything that the context redirects is given back, also after an exception; a second entrance finds the same classes."""

import contextlib
import importlib.util
import sys

import torch
import torch.distributed.nn  # a torch before 2.7 adds a folder of its own to the path

import mpbridge

names = [(torch.cuda, "is_available"), (torch.cuda, "current_device"), (torch, "empty"), (torch.Tensor, "cuda"), (torch.Tensor, "is_cuda"), (torch, "autocast"),
         (torch.distributed, "_coalescing_manager"), (torch.distributed, "init_process_group"), (torch.Tensor, "_make_wrapper_subclass")]  # fmt: skip
before = [getattr(owner, name) for owner, name in names]
modules, path, cuda = set(sys.modules), list(sys.path), torch.version.cuda
te = sys.argv[1]
try:
    with mpbridge.transformer_engine_on_cpu("h100", te=te):
        from transformer_engine.pytorch import Linear as first

        assert torch.cuda.get_device_name() == "H100"
        assert torch.empty(1, device="cuda").is_cuda
        raise KeyError("on purpose")
except KeyError:
    pass
for (owner, name), value in zip(names, before, strict=True):
    assert getattr(owner, name) == value, name
assert torch.version.cuda is cuda
assert [one for one in sys.path if "setuptools" not in one] == path  # which adds a folder of its own, through torch 2.6
ours = (
    "transformer_engine",
    *(() if importlib.util.find_spec("triton") else ("triton",)),
)  # torch for CUDA brings the real one
left = {name for name in set(sys.modules) - modules if name.startswith(ours)}
assert not left, left
with mpbridge.transformer_engine_on_cpu("b200", te=te):
    from transformer_engine.pytorch import Linear as second
    from transformer_engine.pytorch.quantization import check_mxfp8_support

    assert second is first
    assert check_mxfp8_support()[0]
with mpbridge.transformer_engine_on_cpu("h100", te=te):
    assert not check_mxfp8_support()[0]
    with contextlib.suppress(mpbridge.MpbridgeError):
        mpbridge.transformer_engine_on_cpu("b200", te=te).__enter__()
        raise AssertionError("two machines at once")
    with contextlib.suppress(mpbridge.MpbridgeError):
        mpbridge.transformer_engine_on_cpu("h100", te="newest").__enter__()
        raise AssertionError("a release by that name")
print("given back")
