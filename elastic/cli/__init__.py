"""The `keepstep` command: `run`, `status`, `evict`, and the commands of the other packages."""
