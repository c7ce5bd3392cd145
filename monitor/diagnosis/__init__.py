"""From records to verdicts, and from verdicts to what is done: pure functions, on digests that merge up a tree."""
