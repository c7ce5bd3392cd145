"""Runs the checks: `python -m ops.gpu`."""

from __future__ import annotations

import sys

from ops.gpu.catalogue import CHECKS
from ops.gpu.command import main

sys.exit(main(sys.argv[1:], CHECKS))
