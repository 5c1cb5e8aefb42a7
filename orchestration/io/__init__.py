"""Assets of users in shards: their names, what may be stored and loaded, and how a shard gets to new contents."""
