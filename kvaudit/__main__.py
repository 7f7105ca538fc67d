"""`python -m kvaudit` is `kvaudit`."""

from kvaudit.cli import main

main()
