"""Measures the daemon's own node: rings, /proc, cgroups, GPUs, stacks."""
