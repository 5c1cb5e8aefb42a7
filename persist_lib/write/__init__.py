"""The write handle: appends, queued appends, appends to many shards."""
