"""`python -m tlspectral` is the command `tlspectral`."""

from tlspectral.cli.app import main

main()
