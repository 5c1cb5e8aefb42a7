"""Where the bytes are: `Blob` and `Consensus` (see `api`), what implements them, and what wraps them."""
