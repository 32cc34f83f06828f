"""Task ids of this package: id -> "module:class". Other packages use the same entry point."""

TASKS = {
    "Go1-Velocity-Flat-v0": "robots.tasks.go1_velocity:Go1Velocity",
    "CartPole-SwingUp-v0": "robots.tasks.cartpole_swingup:CartPoleSwingUp",
    "Hopper-v5": "robots.tasks.gymnasium_bodies:Hopper",
    "HalfCheetah-v5": "robots.tasks.gymnasium_bodies:HalfCheetah",
    "Walker2d-v5": "robots.tasks.gymnasium_bodies:Walker2d",
    "Ant-v5": "robots.tasks.gymnasium_bodies:Ant",
    "Humanoid-v5": "robots.tasks.gymnasium_bodies:Humanoid",
    "Reach-v0": "robots.tasks.reach:Reach",
    "Pendulum-v0": "robots.tasks.pendulum:Pendulum",
    "Point-Robot-v0": "robots.tasks.point_robot:PointRobot",
    "Cheetah-Vel-v0": "robots.tasks.cheetah_vel:CheetahVel",
}
