"""Task ids of this package: id -> "module:class". Other packages use the same entry point."""

TASKS = {
    "Go1-Velocity-Flat-v0": "robots.tasks.go1_velocity:Go1Velocity",
    "CartPole-SwingUp-v0": "robots.tasks.cartpole_swingup:CartPoleSwingUp",
    "Pendulum-v0": "robots.tasks.pendulum:Pendulum",
}
