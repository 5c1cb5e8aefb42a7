"""Files of a folder or of S3 as a source."""
