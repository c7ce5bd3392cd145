"""Runs the monitor daemon: its loops, its threads and its link to the job's runtime."""
