"""Connects daemons into a tree: summaries and digests go up, clock offsets go down."""
