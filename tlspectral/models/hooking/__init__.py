"""Place hooks on a model for one thread, and remove them completely even if a run is interrupted."""
