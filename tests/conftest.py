"""Before any test imports megatron: a Transformer Engine without its CUDA parts must not be in its way."""

import gc
import os
import signal
import sys
import warnings

import mpbridge  # noqa: F401

# a suite's worker knows the width of the terminal that the suite was started in; what commands print without one is not broken to it
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)

# a suite started in the background or under nohup inherits ignored signals, and a run leaves those alone: tests that send them would see nothing
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


def pytest_collection_finish() -> None:
    """Every engine that closes collects garbage, and so does megatron-core with every checkpoint: a third of such a test would be spent on walking
    through the modules of torch and megatron-core, which stay."""
    if "torch" not in sys.modules:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch._dynamo  # noqa: F401

        import mpbridge.models.gpt
        import mpbridge.train.loop  # noqa: F401
    gc.collect()
    gc.freeze()
