"""Saves and loads by all ranks together: collectives, agreements, plans, exchange of pieces."""
