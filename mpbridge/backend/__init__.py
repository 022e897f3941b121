"""megatron-core and where it runs: its configs and private names, devices, models, engines."""
