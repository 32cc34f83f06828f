import math

import pytest
import torch

from ctrl_rl.networks import ACTIVATIONS, MLP, EnsembleMLP, QEnsemble


def test_names_and_shapes():
    shapes = {k: tuple(v.shape) for k, v in MLP((3, 5, 2), "elu").named_parameters()}
    assert shapes == {
        "layers.0.weight": (5, 3),
        "layers.0.bias": (5,),
        "layers.1.weight": (2, 5),
        "layers.1.bias": (2,),
    }


def test_initial_weights_are_orthogonal_with_the_stated_gain():
    net = MLP((8, 8, 4), "tanh", last_gain=0.01)
    eye = torch.eye(8)
    first, last = (layer.weight.detach() for layer in net.layers)
    torch.testing.assert_close(first @ first.T, 2 * eye, atol=1e-5, rtol=0)
    torch.testing.assert_close(last @ last.T, 1e-4 * eye[:4, :4], atol=1e-9, rtol=0)
    assert all(layer.bias.abs().max() == 0 for layer in net.layers)


def test_forward_by_hand():
    net = MLP((1, 1, 1), "relu")
    with torch.no_grad():
        for layer, weight, bias in zip(net.layers, (2.0, -3.0), (1.0, 5.0), strict=True):
            layer.weight.fill_(weight)
            layer.bias.fill_(bias)
    # 5 - 3 relu(2 x + 1): no activation after the last layer
    assert net(torch.tensor([[2.0], [-2.0]])).flatten().tolist() == [-10.0, 5.0]


def test_activations_are_those_of_torch():
    x = torch.tensor([-2.0, -0.5, 0.0, 1.5])
    for name, reference in (
        ("elu", torch.nn.ELU()),
        ("relu", torch.nn.ReLU()),
        ("tanh", torch.nn.Tanh()),
    ):
        torch.testing.assert_close(ACTIVATIONS[name](x.clone()), reference(x))


def test_the_input_is_left_alone_and_gradients_are_right():
    net = MLP((2, 4, 1), "elu").double()
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    before = x.detach().clone()
    assert torch.autograd.gradcheck(net, (x,))
    assert torch.equal(x, before)


def test_seeded_by_its_generator_alone():
    def weights(seed):
        net = MLP((3, 4, 2), "elu", generator=torch.Generator().manual_seed(seed))
        return torch.cat([p.flatten() for p in net.parameters()])

    state = torch.get_rng_state()
    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert torch.equal(torch.get_rng_state(), state)


def test_bad_arguments():
    with pytest.raises(ValueError, match="known: elu, relu, tanh"):
        MLP((3, 2), "gelu")
    with pytest.raises(ValueError, match="an input and an output size"):
        MLP((3,), "elu")
    assert math.isfinite(MLP((3, 2), "elu")(torch.ones(1, 3)).sum().item())


def test_an_ensemble_is_its_members_side_by_side():
    draw = lambda: torch.Generator().manual_seed(3)  # noqa: E731
    both = EnsembleMLP(2, (3, 5, 2), "relu", 0.5, draw())
    generator = draw()
    members = [MLP((3, 5, 2), "relu", 0.5, generator) for _ in range(2)]
    x = torch.randn(7, 3, generator=generator)
    assert both(x).shape == (2, 7, 2)
    torch.testing.assert_close(both(x), torch.stack([member(x) for member in members]))
    shapes = {k: tuple(v.shape) for k, v in both.named_parameters()}
    assert shapes["layers.0.weight"] == (2, 3, 5) and shapes["layers.1.bias"] == (2, 1, 2)


def test_action_values_read_the_action_scaled_to_its_range():
    low, high = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 10.0])
    critic = QEnsemble(2, 1, low, high, (4,), "relu", torch.Generator().manual_seed(0))
    seen = []
    critic.net.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    found = critic(torch.tensor([[7.0]] * 3), torch.tensor([[-1.0, 0.0], [0.0, 5.0], [0.5, 7.5]]))
    assert found.shape == (2, 3)
    assert seen[0].tolist() == [[7.0, -1.0, -1.0], [7.0, 0.0, 0.0], [7.0, 0.5, 0.5]]
