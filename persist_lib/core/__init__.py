"""The pure core: what a shard's state is, how commands change it, and what should be done about it. No I/O, no clock."""
