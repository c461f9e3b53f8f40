"""The application that the commands of the fingerprint study belong to."""

import typer

app = typer.Typer()
