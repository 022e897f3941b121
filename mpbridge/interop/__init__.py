"""Other stacks' words: their precision settings read, written and compared, and Megatron Bridge's API on this registry."""
