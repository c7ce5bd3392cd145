"""Holds what a daemon knows and concludes: records, verdicts, step times, delays, goodput."""
