"""Runs a worker process: its bootstrap, and its connection to the agent."""
