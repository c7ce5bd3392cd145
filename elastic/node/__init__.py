"""Decides what a node does in the job's generations; the agent carries it out. Pure."""
