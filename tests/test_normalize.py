import io

import pytest
import torch

from ctrl_rl.normalize import Normalizer


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_batches_merge_exactly():
    x = draw(1000, 3) * torch.tensor([1.0, 100.0, 1e-3]) + torch.tensor([0.0, -5.0, 7.0])
    whole, single, uneven = Normalizer(3), Normalizer(3), Normalizer(3)
    whole.update(x)
    for row in x:
        single.update(row[None])
    for part in x.split([1, 499, 0, 7, 493]):
        uneven.update(part)
    for one in (whole, single, uneven):
        assert one.count == 1000
        torch.testing.assert_close(one.mean, x.double().mean(0), rtol=1e-9, atol=1e-9)
        variance = x.double().var(0, correction=0)
        torch.testing.assert_close(one.var, variance, rtol=1e-6, atol=0)


def test_by_hand():
    norm = Normalizer(1)
    norm.update(torch.tensor([[1.0], [3.0]]))  # mean 2, var 1
    norm.update(torch.tensor([[8.0]]))  # mean 4; squares 2 + 0 + 36 * 2 / 3 = 26; var 26 / 3
    assert norm.mean.item() == pytest.approx(4)
    assert norm.var.item() == pytest.approx(26 / 3)
    assert norm(torch.tensor([[7.0]])).item() == pytest.approx(3 / (26 / 3) ** 0.5)


def test_large_offset_keeps_its_variance():
    norm = Normalizer(1)
    for part in (draw(100_000, 1, seed=1) + 1e6).split(1000):
        norm.update(part)
    assert norm.var.item() == pytest.approx(1.0, abs=0.02)
    assert norm(torch.tensor([[1e6 + 1]])).item() == pytest.approx(1.0, abs=0.1)


def test_a_row_with_nan_is_left_out():
    x = draw(10, 2)
    clean = Normalizer(2)
    clean.update(torch.cat([x[:3], x[5:]]))
    x[3, 0], x[4, 1] = float("nan"), float("inf")
    poisoned = Normalizer(2)
    poisoned.update(x)
    assert torch.equal(poisoned.mean, clean.mean)
    assert torch.equal(poisoned.var, clean.var)
    assert poisoned.count == 8
    poisoned.update(torch.full((3, 2), float("nan")))
    assert poisoned.count == 8


def test_constant_column():
    norm = Normalizer(2)
    norm.update(torch.tensor([[5.0, 1.0]]).repeat(10, 1) + torch.tensor([0.0, 1.0]) * draw(10, 1))
    assert norm.var[0] == 0
    assert norm(torch.tensor([[5.0, 1.0]]))[0, 0] == 0
    assert norm(torch.tensor([[6.0, 1.0]]))[0, 0] == 10  # clipped


def test_statistics_move_in_update_alone():
    norm, x = Normalizer(2), draw(50, 2)
    assert torch.equal(norm(x), x.clamp(-10, 10))  # before the first update
    norm.update(x * 3 + 1)
    before = {k: v.clone() for k, v in norm.state_dict().items()}
    first = norm(x)
    for _ in range(3):
        assert torch.equal(norm(x), first)
    assert all(torch.equal(v, before[k]) for k, v in norm.state_dict().items())
    assert x is not first


def test_round_trip_is_exact():
    norm = Normalizer(2)
    norm.update(draw(100, 2) * 1000 + 500)
    file = io.BytesIO()
    torch.save(norm.state_dict(), file)
    file.seek(0)
    again = Normalizer(2)
    again.load_state_dict(torch.load(file, weights_only=True))
    for name in ("mean", "var", "count"):
        assert torch.equal(getattr(norm, name), getattr(again, name))
        assert getattr(again, name).dtype == torch.float64
    x = draw(5, 2, seed=3) * 1000
    assert torch.equal(norm(x), again(x))


def test_missing_statistics_are_refused():
    with pytest.raises(RuntimeError, match="var"):
        Normalizer(2).load_state_dict({"mean": torch.zeros(2), "count": torch.zeros(())})


def test_section_holds_copies():
    norm = Normalizer(2)
    norm.update(draw(10, 2))
    section = norm.section()
    mean = section["mean"].clone()
    norm.update(draw(10, 2, seed=9))
    assert torch.equal(section["mean"], mean)
    assert (section["clip"], section["epsilon"]) == (10.0, 1e-8)
