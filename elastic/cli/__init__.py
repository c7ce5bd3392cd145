"""The `keepstep` command: `run`, `status`, `evict`, and the groups of the other packages."""
