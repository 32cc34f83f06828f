"""Floating-point operations that an update needs, by arithmetic; a multiply-add counts as two.

A layer (n, m) on one sample costs 2 n m forward, as much for the gradient of its weights and as
much for that of its input. Only products with weight matrices count: what activations, losses and
Adam cost is part of what a share of the peak leaves.

Reading order: `forward` -> `trained` -> one function per learner.
"""

import itertools
from collections.abc import Sequence


def forward(sizes: Sequence[int]) -> int:
    """A perceptron of these layer sizes on one sample."""
    return sum(2 * n * m for n, m in itertools.pairwise(sizes))


def trained(sizes: Sequence[int]) -> int:
    """Forward and backward; nobody needs the gradient of the network's input."""
    return 3 * forward(sizes) - forward(sizes[:2])


def ppo_env_step(obs: int, actions: int, hidden: Sequence[int], epochs: int) -> int:
    """One env step of PPO: actor and critic once forward, then `epochs` times trained."""
    networks = (obs, *hidden, actions), (obs, *hidden, 1)
    return sum(forward(sizes) + epochs * trained(sizes) for sizes in networks)


def sac_update(obs: int, actions: int, hidden: Sequence[int], batch_size: int) -> int:
    """One update of SAC: two critics, an actor that gives mean and deviation.

    Critics: next action, two target values, two critics trained. Actor: trained, through two
    critics forward and backward to their action, but not to their weights.
    """
    actor, critic = (obs, *hidden, 2 * actions), (obs + actions, *hidden, 1)
    to_action = forward(critic[1:]) + forward((actions, critic[1]))
    of_critics = forward(actor) + 2 * forward(critic) + 2 * trained(critic)
    of_actor = trained(actor) + 2 * forward(critic) + 2 * to_action
    return batch_size * (of_critics + of_actor)


def td3_bc_update(obs: int, actions: int, hidden: Sequence[int], batch_size: int) -> int:
    """One update of TD3+BC, whose policy takes a step on every second.

    Critics: next action, two target values, two critics trained. Policy: trained, through one
    critic forward and backward to its action, but not to its weights.
    """
    actor, critic = (obs, *hidden, actions), (obs + actions, *hidden, 1)
    to_action = forward(critic[1:]) + forward((actions, critic[1]))
    of_critics = forward(actor) + 2 * forward(critic) + 2 * trained(critic)
    of_actor = trained(actor) + forward(critic) + to_action
    return batch_size * (of_critics + of_actor // 2)


def iql_update(obs: int, actions: int, hidden: Sequence[int], batch_size: int) -> int:
    """One update of IQL: V(s'), two target values; V, two critics and the policy trained."""
    actor, critic, value = (obs, *hidden, actions), (obs + actions, *hidden, 1), (obs, *hidden, 1)
    seen = forward(value) + 2 * forward(critic)
    return batch_size * (seen + trained(value) + 2 * trained(critic) + trained(actor))
