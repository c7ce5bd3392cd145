"""Says what every script of integrations.py trains on, and where its ranks wait."""

EPOCHS, STEPS_PER_EPOCH, GLOBAL_BATCH = 2, 80, 16
STEPS, SAMPLES = EPOCHS * STEPS_PER_EPOCH, STEPS_PER_EPOCH * GLOBAL_BATCH
SAVE_EVERY = 50
GATES = tuple(range(40, 130, 10))
"""Steps after which each rank waits until the benchmark lets it pass."""
