"""Conversion: readers of other tools' checkpoints, writers, and rules between namings."""
