"""Bytes: how states, changes and updates are stored. Pure; every format has a version, a checksum and a golden file."""
