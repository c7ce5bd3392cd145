"""Implements `keepstep ckpt`: works with stored checkpoints, and converts those of other tools."""
