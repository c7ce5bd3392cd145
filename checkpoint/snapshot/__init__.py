"""Snapshots in memory: the server that owns them, what it holds, and their parity."""
