"""The daemon of a node: probes, the tree of daemons, what it serves (page, metrics, events), and the command."""
