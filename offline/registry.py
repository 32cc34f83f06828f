"""Names of this package's algorithms and commands; see `ctrl_rl.registry`."""

ALGOS = {
    "bc": "offline.bc:",
    "td3_bc": "offline.td3_bc:",
    "iql": "offline.iql:",
    "cql": "offline.cql:",
}
"""A module with `<Name>Config`, `METRICS` and `train(config, data, spec, seeds, run, evaluate)`."""
