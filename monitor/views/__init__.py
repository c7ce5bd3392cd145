"""What a daemon shows: page, JSON, Prometheus series, event file."""
