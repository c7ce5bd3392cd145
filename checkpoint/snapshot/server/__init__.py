"""The snapshot server: owns the memory of a node's snapshots; protects, rebuilds, stores them."""
