"""Runs a campaign of random faults against a real job; `ops/bench/chaos.py` is its command.

Pure: `schedule` draws a job and its faults from a seed, `oracle` judges the ranks' records.
`machine` finds what this machine permits; `coordinator`, `storage` and `cluster` run the parts of
the job, `faults` does harm to them, `progress` waits until the job makes steps again, `leftovers`
looks for what it left behind, `campaign` plays one seed, `report` prints the result.
"""
