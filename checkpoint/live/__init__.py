"""Live PyTorch state as boxes: capture, copy into shared memory, restore."""
