"""A table of PostgreSQL as a source. Reading it needs the extra `persist-lib[postgres]`."""
