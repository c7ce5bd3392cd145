"""Connects the monitor to the coordinator: job status, published verdicts, enforcement."""
