"""What `jobs/ingest.py` is made of: inputs, plans, parsers, the journal, and the commits of groups."""
