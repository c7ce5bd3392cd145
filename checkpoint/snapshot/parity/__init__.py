"""The erasure code of snapshots: groups of nodes, placement of parity, encoding. Pure."""
