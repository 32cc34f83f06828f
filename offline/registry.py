"""Names of this package's algorithms and commands; see `ctrl_rl.registry`."""

ALGOS = {
    "td3_bc": "offline.td3_bc:",
}
"""A module with `<Name>Config`, `METRICS` and `train(config, data, spec, seeds, run, evaluate)`."""
