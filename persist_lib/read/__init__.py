"""The read handle: snapshots, splits, listening."""
