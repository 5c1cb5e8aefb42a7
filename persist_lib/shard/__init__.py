"""One shard as a process sees it: its log, the commit loop, leases, batches and runs."""
