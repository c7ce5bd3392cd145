"""Diagnoses a job: records to digests, digests to verdicts, verdicts to actions.

Pure functions; digests merge up a tree of daemons.
"""
