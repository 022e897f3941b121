"""Low-precision recipes on any machine: linear layers whose three GEMMs see operands quantized by Transformer Engine's rules.

How an engine plugs it in (`engines/emulated.py` does it for every engine; `emulation_for` answers None when the run is not emulated or its
recipe quantizes nothing):

    emulation = emulation_for(run)                        # Emulation | None
    provider  = emulation.backend(provider)               # before the layer spec is made: its linears are ours, all else is `provider`'s
    model     = GPTModel(...)                             # as usual; wrap it in Float16Module, DDP ... as usual
    emulation.attach(chunks)                              # after building (before or after wrapping, before FSDP shards): names, hooks
    ...
    emulation.step_begin()                                # before the first micro-batch of every train_step
    emulation.eval_begin()                                # before the first micro-batch of every evaluate
    with emulation.paused(): ...                          # high precision inside, for comparisons
    saved = emulation.sharded_state("emulation.")         # entries for megatron-core's dist_checkpointing, resharding included
    emulation.load_state(saved)                           # takes the same keys back (prefix and all), or what state() gave
    with emulation.listening(who): ...                    # the same, and `who` hears every linear's products (mpbridge.tune)
    emulation.switch(policy)                              # another recipe on the same model, as if built under it
    emulation.notes()                                     # what is not emulated, one sentence each: print them with every result
    emulation.detach()                                    # on close: hooks and caches gone

Delayed scaling updates by itself: forward scales when a TransformerBlock's forward ends with gradients enabled, backward scales when the
backward of the block's first quantized linear ends. Amaxes are max-reduced over megatron-core's amax group (tensor x data x context).
`emulate_linears(module, policy)` does the same for plain `torch.nn.Linear` modules of any model and returns the Emulation.
"""

from mpbridge.emulation.emulation import Emulation, emulation_for
from mpbridge.emulation.modules import emulate_linears

__all__ = ["Emulation", "emulate_linears", "emulation_for"]
