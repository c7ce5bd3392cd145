"""Implements the `keepstep` command: `run`, `status`, `evict`, and the other packages' commands."""
