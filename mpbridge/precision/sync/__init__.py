"""From a policy to the fields of megatron-core's configs: the written table, the plan, and writing it onto live objects. Knows no framework."""
