"""Consensus by way of shard servers."""
