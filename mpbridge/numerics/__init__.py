"""Low-precision recipes on any machine: linear layers whose three GEMMs use operands quantized by Transformer Engine's rules.

`emulate_linears(module, policy)` emulates the plain `torch.nn.Linear` modules of any model and returns the Emulation; in megatron-core's models
`mcore.CoreEmulation` does. Afterwards:

    emulation.step_begin()                                # before the first micro-batch of every train_step
    with emulation.evaluating(): ...                      # an evaluation, behind which training's state is as it was
    with emulation.paused(): ...                          # high precision in the block, for comparisons
    with emulation.listening(who): ...                    # the same, and `who` is called with every linear's products (mpbridge.training.tune)
    emulation.load_state(saved)                           # takes the result of state(), or of sharded_state() with its prefix
    emulation.switch(policy)                              # another recipe on the same model, as if built under it
    emulation.notes()                                     # what is not emulated, one sentence each: print them with every result
    emulation.detach()                                    # on close: removes hooks and caches

Delayed scaling updates automatically: forward scales when a TransformerBlock's forward ends with gradients enabled, backward scales when the
backward of the block's first quantized linear ends.
"""

from mpbridge.numerics.emulation import Emulation
from mpbridge.numerics.modules import emulate_linears

__all__ = ["Emulation", "emulate_linears"]
