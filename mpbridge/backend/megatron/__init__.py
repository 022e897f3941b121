"""megatron-core: its configs built from a plan or written in place, and its recipe of rules for individual modules."""
