"""Everything ambient: clock, sleep, randomness, threads, and what a fork renews."""
