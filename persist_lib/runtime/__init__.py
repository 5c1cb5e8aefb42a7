"""Everything ambient: clock, sleep, randomness, threads, and what is renewed after a fork."""
