"""The erasure code: groups of nodes, placement of parity, encoding. Pure."""
