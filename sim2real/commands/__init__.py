"""The commands `ctrl-rl export` and `ctrl-rl verify`."""
