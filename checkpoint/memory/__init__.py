"""Snapshots in memory: shared buffers, the table of what a node holds, the client of the snapshot server."""
