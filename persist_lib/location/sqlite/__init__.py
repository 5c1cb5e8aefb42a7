"""Consensus in a SQLite database on a local disk."""
