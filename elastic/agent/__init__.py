"""The agent of a node: its membership, its workers, its snapshot server, its connections to other agents."""
