"""`python -m tlspectral.cli` is the command `tlspectral`."""

from tlspectral.cli.app import main

main()
