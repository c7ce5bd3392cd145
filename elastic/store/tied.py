"""Become another program whose life ends with its parent's: `python -m elastic.store.tied PARENT_PID PROGRAM [ARGUMENTS...]`."""

from __future__ import annotations

import os
import sys

from elastic.process import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
