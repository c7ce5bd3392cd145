"""Conversion: writes the checkpoint of any format that is read as one of another."""
