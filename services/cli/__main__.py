"""`python -m services.cli`, the command `orcinus` without an installation."""

from services.cli.app import main

main()
