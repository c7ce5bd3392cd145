"""What a daemon measures on its own node: rings, /proc, cgroups, GPUs, stacks."""
