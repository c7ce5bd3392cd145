"""Where state lies: boxes of global tensors, and a planner of reads between two layouts. Pure."""
