"""Low-precision recipes on any machine: linear layers whose three GEMMs use operands quantized by Transformer Engine's rules.

How an engine uses it (`engines/emulated.py` does it for every engine; `emulation_for` returns None if the run is not emulated or its
recipe quantizes nothing):

    emulation = emulation_for(run)                        # Emulation | None
    provider  = emulation.backend(provider)               # before the layer spec is made: its linears are ours, the rest is `provider`'s
    model     = GPTModel(...)                             # as usual; wrap it in Float16Module, DDP ... as usual
    emulation.attach(chunks)                              # after building (before or after wrapping, before FSDP shards): names, hooks
    ...
    emulation.step_begin()                                # before the first micro-batch of every train_step
    emulation.eval_begin()                                # before the first micro-batch of every evaluate
    with emulation.paused(): ...                          # high precision in the block, for comparisons
    saved = emulation.sharded_state("emulation.")         # entries for megatron-core's dist_checkpointing, resharding included
    emulation.load_state(saved)                           # takes the same keys (with the prefix), or the result of state()
    with emulation.listening(who): ...                    # the same, and `who` is called with every linear's products (mpbridge.tune)
    emulation.switch(policy)                              # another recipe on the same model, as if built under it
    emulation.notes()                                     # what is not emulated, one sentence each: print them with every result
    emulation.detach()                                    # on close: removes hooks and caches

Delayed scaling updates automatically: forward scales when a TransformerBlock's forward ends with gradients enabled, backward scales when the
backward of the block's first quantized linear ends. Amaxes are max-reduced over megatron-core's amax group (tensor x data x context).
`emulate_linears(module, policy)` does the same for plain `torch.nn.Linear` modules of any model and returns the Emulation.
"""

from mpbridge.emulation.emulation import Emulation, emulation_for
from mpbridge.emulation.modules import emulate_linears

__all__ = ["Emulation", "emulate_linears", "emulation_for"]
