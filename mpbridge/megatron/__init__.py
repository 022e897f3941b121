"""megatron-core: its configs made from a plan, written live, and its recipe of rules for single modules."""
