"""Blobs as files, and the scheme `file:`."""
