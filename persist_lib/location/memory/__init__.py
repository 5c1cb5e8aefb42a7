"""Both halves of a location in this process, and the scheme `memory:`."""
