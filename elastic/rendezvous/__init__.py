"""Who takes part in a job, as which ranks, resuming from where: records, decisions, transactions. Pure."""
