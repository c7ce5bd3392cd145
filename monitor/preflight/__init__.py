"""`keepstep doctor`: what is wrong with nodes before a job starts on them."""
