"""The agent of a node: its membership, workers, snapshot server, and connections to peers."""
