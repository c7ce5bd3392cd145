"""The format: global tensors as boxes, and checkpoints of them in storage."""
