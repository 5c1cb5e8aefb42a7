"""Sources: outside data made definite. A source reads files, gives their messages times, and writes collections."""
