"""What megatron-core's configs are, by version: fields, precision rows, classes of the other fields, names. Loads no framework; `mpbridge.megatron` is the part that does."""
