"""Pure plans of the duties: what would be done, as values."""
