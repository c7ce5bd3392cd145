"""Describes boxes of global tensors, and plans reads between two layouts of them. Pure."""
