"""What a worker tells, in shared memory: rings and their readers, the recorders that fill them, clocks, and other tools' dumps."""
