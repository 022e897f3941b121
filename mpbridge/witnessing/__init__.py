"""The audit in anybody's loop: what a few steps of Megatron-LM's, torch's, Hugging Face's, Lightning's or DeepSpeed's training really were.

`witness` observes, `loops` finds out whose loop it is, `core`, `plain` and `zero` read each kind's tensors, `describe` puts them into words,
`callbacks` ties a witness to other projects' trainers.
"""
