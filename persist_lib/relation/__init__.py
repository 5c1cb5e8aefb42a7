"""One relation: its reader and its writer, over the places that hold its rows. A lone shard has one place."""
