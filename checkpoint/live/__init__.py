"""Handles live PyTorch state as boxes: captures it, copies it into shared memory, restores it."""
