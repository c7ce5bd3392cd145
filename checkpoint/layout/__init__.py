"""Where state lies: boxes of global tensors, and the planner of reads between any two layouts. Pure."""
