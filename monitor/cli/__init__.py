"""Implements the monitor's commands: `keepstep monitor`, `keepstep top`, `keepstep doctor`."""
