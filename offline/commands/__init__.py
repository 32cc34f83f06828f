"""Commands of `ctrl-rl` that this package adds."""
