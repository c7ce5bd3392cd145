"""Measures keepstep on clusters, in storages and in its tools; `ops/bench/clusters.py` runs them.

Each module is a part of the benchmark's result, and has two functions:

    not_installed() -> str | None               why it cannot be measured here, and what to install
    measure(directory, *, quick) -> dict        the figures; `directory` is empty, and removed later
"""
