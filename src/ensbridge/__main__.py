"""`python -m ensbridge`."""

from ensbridge.cli import main

main()
