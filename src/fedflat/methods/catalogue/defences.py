"""Averages that a few dishonest clients cannot move far."""

from collections.abc import Callable
from typing import Literal

from fedflat.errors import RecipeError, nearest
from fedflat.methods.catalogue.entry import listed
from fedflat.methods.chain import Method
from fedflat.methods.part import RobustAverage
from fedflat.methods.parts import Bucketing, CentredClipping, GeometricMedian, Krum, NormBound, TrimmedMean


@listed("Yin et al. 2018", "the median of each coordinate; added to any method")
def median() -> Method:
    return Method(TrimmedMean(0.5))


@listed("Yin et al. 2018", "the mean without the ends; added to any method")
def trimmed_mean(trim: float = 0.1) -> Method:
    return Method(TrimmedMean(trim))


@listed("Pillutla et al. 2022", "the geometric median; added to any method")
def geometric_median(steps: int = 50) -> Method:
    return Method(GeometricMedian(steps))


@listed("Karimireddy et al. 2021", "distances from the last move, clipped; added to any method")
def centred_clipping(radius: float = 0.0, steps: int = 3, beta: float = 0.0) -> Method:
    return Method(CentredClipping(radius, steps, beta))


@listed("Blanchard et al. 2017", "the client nearest to its neighbours; added to any method")
def krum(liars: float = 0.2) -> Method:
    return Method(Krum(liars))


@listed("Blanchard et al. 2017", "the mean of such clients; added to any method")
def multi_krum(liars: float = 0.2) -> Method:
    return Method(Krum(liars, several=True))


@listed("Sun et al. 2019", "the mean of updates cut to one length; added to any method")
def norm_bound(factor: float = 1.0) -> Method:
    return Method(NormBound(factor))


@listed("Karimireddy et al. 2022", "a robust average of means over a few clients each; added to any method")
def bucketing(
    around: Literal[
        "median", "trimmed_mean", "geometric_median", "centred_clipping", "krum", "multi_krum", "norm_bound"
    ] = "geometric_median",
    size: int = 2,
) -> Method:
    return Method(Bucketing(_inside(around), size))


def _inside(name: str) -> RobustAverage:
    """Return the robust average for the means of the buckets, with default options."""
    builds: list[Callable[[], Method]] = [
        median, trimmed_mean, geometric_median, centred_clipping, krum, multi_krum, norm_bound
    ]  # fmt: skip
    known = {build.__name__: build for build in builds}
    if name not in known:
        raise RecipeError(f"bucketing: there is no robust average {name!r}; {nearest(str(name), known)}")
    (part,) = known[name]().parts
    assert isinstance(part, RobustAverage)
    return part
