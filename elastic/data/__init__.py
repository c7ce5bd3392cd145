"""Reads the batches of a job: their order, their samples, and the samples' randomness."""
