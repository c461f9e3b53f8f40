"""Studies of three papers, on the core. The core never imports one; `tlspectral study` mounts their commands."""
