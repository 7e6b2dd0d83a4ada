"""Normalisation and augmentation of whole batches, each against the same thing done sample by sample."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.federation.augment import Augment, normalise

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def photos(batch: int = 6, height: int = 9, width: int = 7, channels: int = 3, seed: int = 0) -> Tensor:
    """Random bytes, none of them black, so that a black pixel is always a filled one."""
    return torch.randint(1, 256, (batch, channels, height, width), generator=generator(seed), dtype=torch.uint8)


def slowly_normalised(image: Tensor) -> Tensor:
    channels = [(image[c].double() / 255 - MEAN[c]) / STD[c] for c in range(len(image))]
    return torch.stack(channels).float()


def crops(image: Tensor, margin: int, fill: str) -> list[Tensor]:
    """Every crop of one image that the margin allows, normalised."""
    pad = (margin,) * 4
    if fill == "mean":
        padded = F.pad(slowly_normalised(image), pad)
    else:
        mode = "reflect" if fill == "reflect" else "constant"
        padded = slowly_normalised(F.pad(image.float(), pad, mode=mode))
    height, width = image.shape[1:]
    moves = range(2 * margin + 1)
    return [padded[:, y : y + height, x : x + width] for y in moves for x in moves]


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_normalise_is_x_over_255_minus_mean_over_std(dtype: torch.dtype, layout: torch.memory_format) -> None:
    images = photos()
    result = normalise(images.contiguous(memory_format=layout), MEAN, STD, dtype)
    assert result.dtype == dtype
    assert result.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(result.float(), torch.stack([slowly_normalised(image) for image in images]))


def test_normalise_without_mean_and_std_gives_the_unit_interval() -> None:
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    torch.testing.assert_close(normalise(images, (), ()).flatten(), torch.tensor([0.0, 0.2, 1.0]))


@pytest.mark.parametrize("shape", [(4, 5), (4, 3, 2, 2), (4, 2, 5), (4,)])
def test_floating_numbers_stay_what_they_are_without_mean_and_std(shape: tuple[int, ...]) -> None:
    numbers = torch.randn(shape, generator=generator(), dtype=torch.float64)
    result = normalise(numbers, (), (), torch.float64)
    assert torch.equal(result, numbers)
    assert result.data_ptr() != numbers.data_ptr(), "the caller's array is never the network's input"
    assert normalise(numbers, (), ()).dtype == torch.float32


def test_floating_numbers_are_centred_and_scaled_but_not_divided_by_255() -> None:
    table = torch.tensor([[1.0, 10.0], [3.0, 20.0]])
    assert torch.equal(normalise(table, (1.0, 10.0), (2.0, 4.0)), torch.tensor([[0.0, 0.0], [1.0, 2.5]]))
    assert torch.equal(normalise(table, (1.0,), (1.0,)), table - 1)


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ((0.5, 0.5), (0.5,), "mean has 2 values.*3 channels"),
        ((0.5,), (1.0,) * 4, "std has 4"),
        ((), (0.0,), "std must"),
    ],
)
def test_statistics_that_do_not_fit_are_named(mean: tuple[float], std: tuple[float], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        normalise(photos(), mean, std)


@pytest.mark.parametrize("inputs", [photos(), torch.rand(3, 5), torch.rand(2, 3, 4, 4)])
def test_nothing_switched_on_is_normalise_and_draws_nothing(inputs: Tensor) -> None:
    source = generator()
    assert torch.equal(Augment()(inputs, (0.5,), (0.5,), source), normalise(inputs, (0.5,), (0.5,)))
    assert torch.equal(source.get_state(), generator().get_state())


@pytest.mark.parametrize("fill", ["black", "mean", "reflect"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_every_sample_is_one_of_its_crops_and_all_crops_occur(fill: Any, layout: torch.memory_format) -> None:
    image = photos(batch=1, height=5, width=6)
    batch = image.expand(400, -1, -1, -1).contiguous(memory_format=layout)
    allowed = crops(image[0], margin=2, fill=fill)
    results = Augment(crop=2, crop_fill=fill)(batch, MEAN, STD, generator())
    found = [[number for number, crop in enumerate(allowed) if close(result, crop)] for result in results]
    assert all(len(matches) == 1 for matches in found)
    assert {matches[0] for matches in found} == set(range(25)), "25 crops, 400 draws: one is missed once in 10⁵ times"


def test_each_sample_is_cropped_from_itself() -> None:
    images = photos(batch=20)
    for image, result in zip(images, Augment(crop=1)(images, MEAN, STD, generator()), strict=True):
        assert any(close(result, crop) for crop in crops(image, margin=1, fill="black"))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32), st.sampled_from([1, 3]))
def test_crop_stays_within_its_margin(margin: int, seed: int, channels: int) -> None:
    """At most `margin` rows and columns at the edge are filled: the middle is always image."""
    images = photos(height=9, width=12, channels=channels, seed=seed)
    result = Augment(crop=margin)(images, (), (), generator(seed))
    filled = (result == 0).all(dim=1)
    assert not filled[:, margin : 9 - margin, margin : 12 - margin].any()
    assert (filled.all(dim=2).sum(dim=1) <= margin).all()
    assert (filled.all(dim=1).sum(dim=1) <= margin).all()


def test_mean_fill_is_zero_after_normalisation_and_black_fill_is_minus_mean_over_std() -> None:
    images = photos(batch=50)
    black, mean = (Augment(crop=3, crop_fill=fill)(images, MEAN, STD, generator()) for fill in ("black", "mean"))
    filled = (Augment(crop=3)(images, (), (), generator()) == 0).all(dim=1)
    assert filled.any()
    assert not mean.permute(0, 2, 3, 1)[filled].any()
    darkness = -torch.tensor(MEAN) / torch.tensor(STD)
    torch.testing.assert_close(black.permute(0, 2, 3, 1)[filled], darkness.expand(int(filled.sum()), 3))
    assert torch.equal(black.permute(0, 2, 3, 1)[~filled], mean.permute(0, 2, 3, 1)[~filled])


def test_crop_probability_is_how_often_a_sample_moves() -> None:
    images = photos(batch=4000, height=5, width=5)
    results = Augment(crop=2, crop_probability=0.3)(images, MEAN, STD, generator())
    moved = (results != normalise(images, MEAN, STD)).flatten(1).any(dim=1)
    # One draw in 25 moves nowhere; the standard error is 0.0072.
    assert moved.float().mean().item() == pytest.approx(0.3 * 24 / 25, abs=0.03)
    assert torch.equal(
        Augment(crop=2, crop_probability=0.0)(images, MEAN, STD, generator()), normalise(images, MEAN, STD)
    )


def test_flip_mirrors_each_sample_with_its_probability() -> None:
    images = photos(batch=2000)
    straight = normalise(images, MEAN, STD)
    results = Augment(flip=0.25)(images, MEAN, STD, generator())
    flipped = torch.tensor([torch.equal(a, b.flip(2)) for a, b in zip(results, straight, strict=True)])
    unchanged = torch.tensor([torch.equal(a, b) for a, b in zip(results, straight, strict=True)])
    assert (flipped ^ unchanged).all()
    assert flipped.float().mean().item() == pytest.approx(0.25, abs=0.04)


def test_flip_twice_is_the_identity() -> None:
    numbers = torch.randn(5, 3, 4, 6, generator=generator())
    mirror = Augment(flip=1.0)
    once = mirror(numbers, (), (), generator())
    assert not torch.equal(once, numbers)
    assert torch.equal(mirror(once, (), (), generator()), numbers)


def test_crop_and_flip_together_are_a_flip_of_a_crop() -> None:
    images = photos(batch=40, height=5, width=6)
    for image, result in zip(images, Augment(crop=2, flip=0.5)(images, MEAN, STD, generator()), strict=True):
        candidates = crops(image, margin=2, fill="black")
        assert any(close(result, crop) or close(result, crop.flip(2)) for crop in candidates)


@pytest.mark.parametrize("side", [1, 3, 4])
def test_cutout_zeroes_one_square_clipped_at_the_border_and_nothing_else(side: int) -> None:
    images = photos(batch=1500, height=6, width=8)
    straight = normalise(images, (), ())
    results = Augment(cutout=side)(images, (), (), generator())
    hole = (results == 0).all(dim=1)
    assert torch.equal(results, straight * ~hole.unsqueeze(1))
    centres = [(y, x) for y in range(6) for x in range(8)]
    squares = []
    for y, x in centres:
        square = torch.zeros(6, 8, dtype=torch.bool)
        top, left = y - side // 2, x - side // 2
        square[max(top, 0) : top + side, max(left, 0) : left + side] = True
        squares.append(square)
    allowed = torch.stack(squares)
    counts = (hole.unsqueeze(1) == allowed).flatten(2).all(dim=2).float()
    assert counts.sum(dim=1).min() >= 1, "every hole is a clipped square"
    expected = allowed.flatten(1).sum(dim=1).float()
    error = expected.std().item() / 1500**0.5
    assert hole.flatten(1).sum(dim=1).float().mean().item() == pytest.approx(
        expected.mean().item(), abs=4 * error + 1e-6
    )


def test_the_generator_alone_decides() -> None:
    images = photos(batch=50, height=32, width=32)
    augment = Augment(crop=4, crop_probability=0.5, flip=0.5, cutout=16)
    before = torch.random.get_rng_state()
    first = augment(images, MEAN, STD, generator(1))
    torch.rand(2)
    torch.random.set_rng_state(before)
    assert torch.equal(augment(images, MEAN, STD, generator(1)), first)
    assert not torch.equal(augment(images, MEAN, STD, generator(2)), first)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_memory_layout_does_not_matter_and_the_result_is_channels_last() -> None:
    images = photos(batch=8)
    strided = torch.stack((images, images), dim=-1)[..., 0]
    augment = Augment(crop=2, flip=0.5, cutout=3)
    results = [
        augment(x, MEAN, STD, generator())
        for x in (images, images.contiguous(memory_format=torch.channels_last), strided, photos(batch=9)[:8])
    ]
    assert all(result.is_contiguous(memory_format=torch.channels_last) for result in results)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert results[0].shape == images.shape


def test_the_stored_images_are_never_changed() -> None:
    images, numbers = photos(), torch.rand(4, 3, 6, 6)
    kept = images.clone(), numbers.clone()
    for inputs in (images, numbers):
        Augment(crop=2, flip=0.5, cutout=3)(inputs, (), (), generator()).zero_()
        normalise(inputs, (), ()).zero_()
    assert torch.equal(images, kept[0])
    assert torch.equal(numbers, kept[1])


def test_an_empty_batch_stays_empty() -> None:
    assert Augment(crop=2, flip=0.5, cutout=3)(photos()[:0], MEAN, STD, generator()).shape == (0, 3, 9, 7)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("crop", -1),
        ("crop", 1.5),
        ("crop_probability", 1.2),
        ("crop_probability", float("nan")),
        ("crop_fill", "white"),
        ("flip", -0.1),
        ("flip", "often"),
        ("cutout", -16),
    ],
)
def test_an_option_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=rf"augment\.{field} .*{value}"):
        Augment(**{field: value})


@pytest.mark.parametrize(
    ("options", "field"), [({"flip": 0.5}, "flip"), ({"crop": 1}, "crop"), ({"cutout": 1}, "cutout")]
)
def test_samples_that_are_no_images_cannot_be_augmented(options: dict[str, Any], field: str) -> None:
    with pytest.raises(RecipeError, match=rf"augment\.{field} needs images.*\(5,\)"):
        Augment(**options)(torch.rand(3, 5), (), (), generator())


def test_a_crop_margin_must_be_smaller_than_the_image() -> None:
    with pytest.raises(RecipeError, match=r"augment\.crop = 7 .* 9×7"):
        Augment(crop=7)(photos(), MEAN, STD, generator())
