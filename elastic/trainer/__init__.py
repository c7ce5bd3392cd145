"""The part in the training process: `join`, `Job`, process groups, snapshots of the state."""
