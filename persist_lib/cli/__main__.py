"""`python -m persist_lib.cli`."""

from persist_lib.cli import main

main()
