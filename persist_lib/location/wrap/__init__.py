"""What every store is wrapped in: counting, trying again, caching, read-only, deadlines."""
