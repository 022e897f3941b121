"""Describes megatron-core's configs by version: fields, the table of precision fields, classification of the others, names. Loads no framework; `mpbridge.backend.megatron` does."""
