"""Records what a worker does into a ring in shared memory, and reads such rings from outside."""
