"""What a daemon remembers and concludes: verdicts, step times, delays, goodput."""
