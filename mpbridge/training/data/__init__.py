"""Text to micro-batches: corpora, the tokenizer, preprocessing into megatron-core's .bin/.idx, and batches from its GPTDataset."""
