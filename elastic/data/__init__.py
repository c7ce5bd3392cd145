"""The batches of a job: their order, reading them, and what is random in their samples."""
