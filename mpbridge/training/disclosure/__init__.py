"""What a run computed in, for others: MLPerf's keys, a signed record of a checkpoint, a model card. Loads no framework."""
