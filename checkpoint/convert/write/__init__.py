"""Writes a checkpoint of any format that is read in any other that is written."""
