"""Studies of three papers, on tlspectral; `tlspectral study` mounts their commands."""
