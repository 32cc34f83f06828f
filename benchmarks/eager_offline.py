"""TD3+BC and IQL as a plain eager torch loop on `dummy_data.py`: the usual one-file research code.

Two critics in modules of their own, default Adam, five gathers per minibatch, losses read out after
every update. Equations are those of `offline.td3_bc` and `offline.iql`.
"""

import copy

import dummy_data
import torch
import worker
from torch import nn
from torch.nn.functional import mse_loss

BLOCK = 50


def mlp(*sizes):
    """Linear layers with relu between them."""
    layers = []
    for i in range(len(sizes) - 1):
        layers += [nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def q(critic, obs, action):
    """(B,)."""
    return critic(torch.cat([obs, action], 1))[:, 0]


def move(target, source):
    """A step of 0.005 towards the source, parameter by parameter."""
    for t, p in zip(target.parameters(), source.parameters(), strict=True):
        t.data.copy_(0.995 * t.data + 0.005 * p.data)


def step(optimizer, loss):
    """Of one optimiser."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class TD3BC:
    """Update by update."""

    def __init__(self, hidden, rate):
        self.actor = nn.Sequential(mlp(dummy_data.OBS, *hidden, dummy_data.ACTIONS), nn.Tanh())
        self.critics = [mlp(dummy_data.OBS + dummy_data.ACTIONS, *hidden, 1) for _ in range(2)]
        self.targets = copy.deepcopy([self.actor, *self.critics])
        self.actor_adam = torch.optim.Adam(self.actor.parameters(), rate)
        self.critic_adams = [torch.optim.Adam(c.parameters(), rate) for c in self.critics]
        self.count = 0

    def update(self, obs, action, reward, next_obs, done):
        """One minibatch; what a log would show."""
        self.count += 1
        with torch.no_grad():
            noise = (0.2 * torch.randn_like(action)).clamp(-0.5, 0.5)
            next_action = (self.targets[0](next_obs) + noise).clamp(-1, 1)
            next_q = torch.min(*(q(c, next_obs, next_action) for c in self.targets[1:]))
            y = reward + 0.99 * (1 - done) * next_q
        loss = sum(mse_loss(q(c, obs, action), y) for c in self.critics)
        for adam in self.critic_adams:
            adam.zero_grad()
        loss.backward()
        for adam in self.critic_adams:
            adam.step()
        shown = [loss.item()]
        if self.count % 2 == 0:
            chosen = self.actor(obs)
            value = q(self.critics[0], obs, chosen)
            weight = 2.5 / value.abs().mean().detach()
            actor_loss = -weight * value.mean() + mse_loss(chosen, action)
            step(self.actor_adam, actor_loss)
            shown.append(actor_loss.item())
            for target, source in zip(self.targets, (self.actor, *self.critics), strict=True):
                move(target, source)
        return shown


class IQL:
    """Update by update."""

    def __init__(self, hidden, rate):
        self.mean = nn.Sequential(mlp(dummy_data.OBS, *hidden, dummy_data.ACTIONS), nn.Tanh())
        self.log_std = nn.Parameter(torch.zeros(dummy_data.ACTIONS))
        self.critics = nn.ModuleList(
            mlp(dummy_data.OBS + dummy_data.ACTIONS, *hidden, 1) for _ in range(2)
        )
        self.targets = copy.deepcopy(self.critics)
        self.value = mlp(dummy_data.OBS, *hidden, 1)
        self.actor_adam = torch.optim.Adam([*self.mean.parameters(), self.log_std], rate)
        self.critic_adam = torch.optim.Adam(self.critics.parameters(), rate)
        self.value_adam = torch.optim.Adam(self.value.parameters(), rate)

    def update(self, obs, action, reward, next_obs, done):
        """One minibatch; what a log would show."""
        with torch.no_grad():
            next_v = self.value(next_obs)[:, 0]
            target = torch.min(*(q(c, obs, action) for c in self.targets))
        advantage = target - self.value(obs)[:, 0]
        value_loss = ((0.7 - (advantage < 0).float()).abs() * advantage.square()).mean()
        step(self.value_adam, value_loss)
        y = reward + 0.99 * (1 - done) * next_v
        critic_loss = sum(mse_loss(q(c, obs, action), y) for c in self.critics) / 2
        step(self.critic_adam, critic_loss)
        move(self.targets, self.critics)
        weight = (3.0 * advantage.detach()).exp().clamp(max=100.0)
        policy = torch.distributions.Normal(self.mean(obs), self.log_std.clamp(-20, 2).exp())
        actor_loss = -(weight * policy.log_prob(action).sum(1)).mean()
        step(self.actor_adam, actor_loss)
        return [value_loss.item(), critic_loss.item(), actor_loss.item()]


def run(config, tick):
    """Updates for ever; one tick per block."""
    torch.set_num_threads(config["torch_threads"])
    torch.manual_seed(0)
    obs, action, reward = map(torch.from_numpy, dummy_data.arrays(config["rows"]))
    next_obs, done = obs.roll(-1, 0), torch.zeros(len(obs))
    s = config["settings"]
    learner = {"td3_bc": TD3BC, "iql": IQL}[config["algo"]](s["hidden"], s["learning_rate"])
    while True:
        for _ in range(BLOCK):
            rows = torch.randint(len(obs), (s["batch_size"],))
            learner.update(*(x[rows] for x in (obs, action, reward, next_obs, done)))
        tick(BLOCK)


if __name__ == "__main__":
    worker.serve(run, ("torch",))
