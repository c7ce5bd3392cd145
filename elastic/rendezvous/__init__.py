"""Decides who takes part in a job, as which ranks, resuming from where. Pure."""
