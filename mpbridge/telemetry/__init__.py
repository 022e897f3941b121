"""Low precision while a run trains: what quantization does to live tensors, every so many steps, as data beside the metrics."""
