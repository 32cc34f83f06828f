"""Commands of this package; see `offline.registry`."""
