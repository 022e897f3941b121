"""The training loop on megatron-core's schedules: thin, with hooks where audits, checkpoints and schedules come in."""
