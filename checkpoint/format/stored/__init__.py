"""Checkpoints in storage: format, writer, reader, storage back ends, housekeeping."""
