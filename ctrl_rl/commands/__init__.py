"""One module per command of `ctrl-rl`; heavy imports stand inside the functions."""
