"""The snapshot server of a node: owns snapshots' memory, protects, rebuilds and stores them."""
