"""Finds what is wrong with nodes before a job starts on them: `keepstep doctor`."""
