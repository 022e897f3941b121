"""What training computed with, as engines serve it: quantized folders written from checkpoints, and folders compared with the run they came from."""
