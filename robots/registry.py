"""Task ids of this package: id -> "module:class". Other packages use the same entry point."""

TASKS = {
    "Pendulum-v0": "robots.tasks.pendulum:Pendulum",
}
