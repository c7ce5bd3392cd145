"""Reads the notices by which a cloud announces that it takes a machine away."""
