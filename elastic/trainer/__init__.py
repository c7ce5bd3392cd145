"""The training loop's side: `join`, `Job`, process groups, snapshots of the training state, data."""
