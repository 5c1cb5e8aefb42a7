"""Wrappers around every store: counting, retrying, caching, read-only access, deadlines."""
