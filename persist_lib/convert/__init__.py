"""The border: what users pass becomes Arrow tables of exactly the schema, or is refused."""
