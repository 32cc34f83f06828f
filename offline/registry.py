"""Names of this package's algorithms, planners and commands; see `ctrl_rl.registry`."""

ALGOS = {
    "bc": "offline.bc:",
    "td3_bc": "offline.td3_bc:",
    "iql": "offline.iql:",
    "cql": "offline.cql:",
}
"""A module with `<Name>Config`, `METRICS` and `train(config, data, spec, seeds, run, evaluate)`."""

POLICIES = {
    "diffuser": "offline.planner:Planner",
    "metadiffuser": "offline.metadiffuser:MetaPlanner",
}
"""Kind of a policy section -> what `ctrl_rl.load_policy` builds of it: a class with `from_section`,
and with the calls of `ctrl_rl.policy.Policy`."""

COMMANDS = {
    "dataset": "offline.commands.dataset:main",
    "offline": "offline.commands.offline:main",
}
"""This package's commands; see `ctrl_rl.cli`."""
