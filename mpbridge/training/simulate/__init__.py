"""One rank of a large world on one machine: the real megatron-core and our engine on fake process groups and meta tensors, compared with predictions."""
