"""Low precision while a run trains: the effect of quantization on live tensors, measured at regular steps and stored next to the metrics."""
