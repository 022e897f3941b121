"""The audit in any training loop: observes what a few steps of Megatron-LM, torch, Hugging Face, Lightning or DeepSpeed training actually do.

`witness` observes, `loops` identifies the kind of loop, `core`, `plain` and `zero` read each kind's tensors, `describe` puts them into words,
`callbacks` attaches a witness to other projects' trainers.
"""
