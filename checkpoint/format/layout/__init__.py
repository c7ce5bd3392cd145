"""Boxes of global tensors, and a planner of reads between two layouts of them. Pure."""
