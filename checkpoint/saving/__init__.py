"""Saves that do not block: shared buffers, a process that writes, and how all ranks commit."""
