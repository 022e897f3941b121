"""The audit in any training loop: observes what a few steps of Megatron-LM, torch, Hugging Face, Lightning or DeepSpeed training actually do.

`witness` observes, `kinds` finds the kind of loop, `core`, `core_sharded`, `plain`, `sharded` and `deepspeed` read each kind's tensors, `universal_checks`
judges what holds in every precision, `describe` puts a loop into words, `callbacks` attaches a witness to other projects' trainers.
"""
