"""The tree of daemons: summaries and digests on their way up, clocks on their way down."""
