"""Snapshots in memory: shared buffers, the table of what a node holds, the server's client."""
