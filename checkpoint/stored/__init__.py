"""Checkpoints in storage: format, writers, readers, storage back ends, housekeeping."""
