import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ctrl_rl import compiled
from ctrl_rl.compiled import Diverged, MinibatchStep, cache_folder, pays


class Pair(nn.Module):
    """Two linear maps and a loose parameter."""

    def __init__(self, seed=0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 1)


def objective(module, x, target):
    out = module.second(torch.tanh(module.first(x) * module.scale))
    loss = (out[:, 0] - target).square().mean()
    return loss, torch.stack([loss.detach(), out.detach().mean()])


def data(seed=0, scale=1.0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(16, 3, generator=draw), scale * torch.randn(16, generator=draw)


def shrink(learning_rate, stats):
    return torch.where(stats[0] > 0.1, learning_rate * 0.9, learning_rate)


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def reference(module, steps, max_grad_norm, scale=1.0, adapt=None):
    """The same with torch's own clipping and Adam over separate parameters."""
    rate = torch.tensor(1e-2)
    adam = torch.optim.Adam(module.parameters(), lr=1e-2, eps=1e-5)
    for i in range(steps):
        adam.zero_grad()
        loss, stats = objective(module, *data(i, scale))
        loss.backward()
        for part in ([module.scale], module.first.parameters(), module.second.parameters()):
            nn.utils.clip_grad_norm_(part, max_grad_norm)
        if adapt is not None:
            rate = adapt(rate, stats)
            adam.param_groups[0]["lr"] = rate.item()
        adam.step()
    return weights(module)


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_eager_equals_torch(scale):
    module = Pair()
    step = MinibatchStep(module, objective, 1e-2, 0.5, shrink)
    before = weights(module)
    for i in range(10):
        stats = step(*data(i, scale))
    expected = reference(Pair(), 10, 0.5, scale, shrink)
    torch.testing.assert_close(weights(module), expected, rtol=1e-5, atol=1e-6)
    assert (weights(module) - before).abs().min() > 1e-4
    assert step.learning_rate.item() == pytest.approx(1e-2 * 0.9**10)
    assert stats.shape == (4,)
    assert stats[-1] == stats[0]  # the loss


def test_stats_carry_the_norm_before_clipping():
    module = Pair()
    loss, _ = objective(module, *data())
    gradient = torch.autograd.grad(loss, tuple(module.parameters()))
    norm = torch.cat([g.flatten() for g in gradient]).norm().item()
    stats = MinibatchStep(module, objective, 1e-2, 1e-3)(*data())
    assert stats[-2].item() == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_changes_nothing(bad):
    module = Pair()
    step = MinibatchStep(module, objective, 1e-2, 0.5)
    step(*data())
    before, state = weights(module), step.state_dict()["optimizer"]["state"][0]
    moments = {k: v.clone() for k, v in state.items()}
    x, target = data(1)
    target[3] = bad
    with pytest.raises(Diverged, match="gradient norm nan|gradient norm inf"):
        step(x, target)
    assert torch.equal(weights(module), before)
    after = step.state_dict()["optimizer"]["state"][0]
    assert all(torch.equal(moments[k], after[k]) for k in moments)


def test_state_round_trip_does_not_share_memory():
    module = Pair()
    step = MinibatchStep(module, objective, 1e-2, 0.5)
    step(*data())
    state = step.state_dict()
    other_module = Pair()
    other_module.load_state_dict(module.state_dict())
    other = MinibatchStep(other_module, objective, 1e-2, 0.5)
    other.load_state_dict(state)
    for i in range(3):
        step(*data(i))
    for i in range(3):
        other(*data(i))
    assert torch.equal(weights(module), weights(other_module))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A compiler's cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    yield cache_folder()
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)


@pytest.mark.slow
def test_compiled_equals_eager_and_reads_its_state(cache):
    module, eager_module = Pair(), Pair()
    step = MinibatchStep(module, objective, 1e-2, 0.5, shrink, compiled=True)
    eager = MinibatchStep(eager_module, objective, 1e-2, 0.5, shrink)
    for i in range(10):
        stats, eager_stats = step(*data(i)), eager(*data(i))
        torch.testing.assert_close(stats, eager_stats, rtol=1e-4, atol=1e-5)
    assert step.compiled
    assert any(cache.rglob("*.so"))
    torch.testing.assert_close(weights(module), weights(eager_module), rtol=1e-4, atol=1e-5)
    # Each goes on from the other's state, in the mode that was saved with it.
    state, eager_state = step.state_dict(), eager.state_dict()
    eager.load_state_dict({**state, "compiled": False})
    step.load_state_dict({**eager_state, "compiled": True})
    eager_module.load_state_dict(module.state_dict())
    step(*data(11)), eager(*data(11))
    torch.testing.assert_close(weights(module), weights(eager_module), rtol=1e-4, atol=1e-5)
    x, target = data(1)
    target[3] = float("nan")
    before = weights(module)
    with pytest.raises(Diverged):
        step(x, target)
    assert torch.equal(weights(module), before)


@pytest.mark.slow
def test_broken_files_in_the_cache_are_built_anew(cache):
    """A killed process leaves empty files behind; the next one, not this, meets them."""
    code = """
import torch; torch.set_num_threads(1)
from test_compiled import Pair, MinibatchStep, data, objective
step = MinibatchStep(Pair(), objective, 1e-2, 0.5, compiled=True)
step(*data())
print("compiled" if step.compiled else "eager")
"""
    here = str(Path(__file__).parent)
    run = lambda: subprocess.run(  # noqa: E731
        [sys.executable, "-W", "error::UserWarning:ctrl_rl", "-c", code],
        env={**os.environ, "PYTHONPATH": here},
        capture_output=True,
        text=True,
    )
    assert run().stdout == "compiled\n"
    libraries = list(cache.rglob("*.so"))
    assert libraries
    for library in libraries:
        library.write_bytes(b"")
    second = run()
    assert second.stdout == "compiled\n", second.stderr
    assert all(library.exists() for library in libraries)  # another process may use them
    assert cache_folder() == cache.with_name(cache.name.replace("-1", "-2")) != cache
    assert any(library.stat().st_size for library in cache_folder().rglob("*.so"))
    third = run()
    assert third.stdout == "compiled\n" and len([*cache.parent.iterdir()]) == 2


@pytest.mark.parametrize("graphs", [1, 2])
def test_what_is_compiled_equals_eager_and_a_bad_number_changes_nothing(monkeypatch, graphs):
    """The functions behind the graphs, called without a compiler."""
    monkeypatch.setattr(compiled, "_graph", lambda function: function)
    module, eager_module = Pair(), Pair()
    step = MinibatchStep(module, objective, 1e-2, 0.5, shrink, compiled=True, check_each=False)
    eager = MinibatchStep(eager_module, objective, 1e-2, 0.5, shrink)
    if graphs == 2:
        step._graphs = step._functional_gradient, step._functional_adam
    for i in range(10):
        torch.testing.assert_close(step(*data(i)), eager(*data(i)), rtol=1e-4, atol=1e-5)
    assert step._graphs is not None and len(step._graphs) == graphs
    torch.testing.assert_close(weights(module), weights(eager_module), rtol=1e-4, atol=1e-5)
    assert step.learning_rate.item() == pytest.approx(1e-2 * 0.9**10)
    x, target = data(1)
    target[3] = float("nan")
    before = weights(module), *(x.clone() for x in step._adam_state())
    stats = step(x, target)
    with pytest.raises(Diverged):
        step.check(stats)
    after = weights(module), *step._adam_state()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    step(*data(1))
    assert not torch.equal(weights(module), before[0])


def test_a_rank_without_rows_takes_the_same_step_in_compiled_mode(monkeypatch):
    monkeypatch.setattr(compiled, "_graph", lambda function: function)
    monkeypatch.setattr(compiled.distributed, "world_size", lambda: 2)
    monkeypatch.setattr(compiled.distributed, "any_rank", lambda flag: flag)
    means = {}
    a, b = (MinibatchStep(Pair(), objective, 1e-2, 0.5, shrink, compiled=True) for _ in range(2))
    for k in range(6):
        mean = lambda x, rows, k=k: means.setdefault(k, x.clone())  # noqa: E731
        monkeypatch.setattr(compiled.distributed, "weighted_mean", mean)
        a(*data(k))
        b(*(x[: 0 if k % 2 == 0 else None] for x in data(k)))
        assert torch.equal(a._flat, b._flat)


def test_in_a_group_none_compiles_where_one_cannot(monkeypatch):
    monkeypatch.setattr(compiled, "_graph", lambda function: function)
    monkeypatch.setattr(compiled.distributed, "any_rank", lambda flag: True)
    step = MinibatchStep(Pair(), objective, 1e-2, 0.5, compiled=True)
    with pytest.warns(UserWarning, match="going on in eager mode: on another rank"):
        step(*data())
    assert step._graphs is None and not step.state_dict()["compiled"]


def test_without_a_compiler_it_goes_on_in_eager_mode(cache, monkeypatch):
    calls = []

    def broken(function):
        calls.append(function)
        raise RuntimeError("no C++ compiler\nand more lines")

    monkeypatch.setattr(compiled, "_graph", broken)
    cache.mkdir(parents=True)
    (cache / "graph").touch()
    module = Pair()
    step = MinibatchStep(module, objective, 1e-2, 0.5, compiled=True)
    with pytest.warns(UserWarning, match="eager mode: RuntimeError: no C\\+\\+ compiler$"):
        step(*data())
    assert len(calls) == 2  # one retry
    assert cache_folder() == cache and [*cache.iterdir()] == [cache / "graph"]  # it was well
    assert not step.state_dict()["compiled"]
    eager_module = Pair()
    MinibatchStep(eager_module, objective, 1e-2, 0.5)(*data())
    assert torch.equal(weights(module), weights(eager_module))


def test_a_cache_that_the_user_chose_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert compiled._retire_cache() is None
    assert not any(tmp_path.iterdir())


def test_cache_lies_in_the_users_folder(cache):
    assert cache.parent.name == "ctrl-rl"
    assert torch.__version__ in cache.name
    assert isinstance(cache, Path)


def test_compilation_pays_for_long_runs_only():
    assert not pays(2_000, 2048, (128, 128))
    assert pays(30_000, 2048, (128, 128))
    assert not pays(10_000, 64, (64, 64))
    assert pays(150_000, 64, (64, 64))
