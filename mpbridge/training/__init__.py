"""The training loop on megatron-core's schedules: thin, with hooks for audits, checkpoints and schedules."""
