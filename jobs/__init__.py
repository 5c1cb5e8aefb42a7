"""Runnable PySpark programs."""
