"""Readers of the checkpoints of other tools, each as a `Source` of boxes of named tensors."""
