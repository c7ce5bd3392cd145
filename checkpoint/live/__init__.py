"""Live PyTorch state as boxes: capturing it, copying it into shared memory, restoring it."""
