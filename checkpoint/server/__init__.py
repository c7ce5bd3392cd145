"""The snapshot server of a node: owns the memory of snapshots, protects, rebuilds and stores them."""
