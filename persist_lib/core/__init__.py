"""The pure core: what a shard's state is, how commands change it, what should be done about it. No I/O, no clock."""
