"""The watch over a training job: what workers tell through shared memory, and what others make of it."""
