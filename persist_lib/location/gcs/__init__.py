"""Objects on Google Cloud Storage."""
