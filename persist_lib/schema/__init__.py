"""What updates look like: the columns of a shard, their types, and pydantic models of them."""
