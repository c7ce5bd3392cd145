"""Presents a daemon's state: page, JSON, Prometheus series, event file."""
