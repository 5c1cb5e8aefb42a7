"""Objects on S3, or on a server with its protocol."""
