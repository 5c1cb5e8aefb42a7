"""What object stores of clouds have in common: URLs, listings, Blobs on them, and Consensus without a database."""
