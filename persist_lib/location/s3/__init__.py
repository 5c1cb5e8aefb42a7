"""Blobs on S3, and Consensus there without a database."""
