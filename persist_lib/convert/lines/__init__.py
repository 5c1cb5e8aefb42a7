"""Lines of text as rows: JSON, CSV and changes as Debezium writes them, parsed by Arrow. Each bad line is found.

Nothing here opens a file or asks for a clock: what is given is bytes, and what comes out are tables and reasons.
"""
