"""Converts checkpoints: reads other tools' formats, writes them, and maps names by rules."""
