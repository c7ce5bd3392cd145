"""Reads checkpoints of other tools, each as a `Source` of boxes of named tensors."""
