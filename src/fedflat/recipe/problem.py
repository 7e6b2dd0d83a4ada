"""The recipe's sections for the data, their split over the clients, and the model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from fedflat.recipe.section import Draws, Named, Section

BufferPolicy = Literal["average", "local", "refuse"]


class Data(Named):
    """The samples, and how a batch of them is normalised and augmented."""

    name: str = Field("digits", description="data set, see `fedflat data list`, or package.module:Class")
    dir: str | None = Field(None, description="data directory; else $FEDFLAT_DATA, else the user's cache folder")
    normalise: bool = Field(True, description="(x − mean)/std of inputs in [0, 1]; false leaves them in [0, 1]")
    mean: list[float] | None = Field(None, description="channel means of inputs in [0, 1]; else the data set's")
    std: list[float] | None = Field(None, description="channel standard deviations; else the data set's")
    limit: int = Field(0, ge=0, description="training samples at most, drawn by the split's seed; 0 = all")
    crop: int = Field(0, ge=0, description="padding of a random crop; 0 = none")
    crop_probability: float = Field(1.0, ge=0, le=1, description="share of the samples that are cropped")
    crop_fill: Literal["black", "mean", "reflect"] = Field("black", description="value of the padding")
    flip: float = Field(0.0, ge=0, le=1, description="probability of a horizontal flip")
    cutout: int = Field(0, ge=0, description="side of the square that is cut out; 0 = none")
    window: int = Field(0, ge=0, description="tokens of a sample of text; 0 = the data set's default")
    stride: int = Field(0, ge=0, description="tokens between two windows; 0 = 1 for `next`, the window for `all`")
    predict: Literal["next", "all"] = Field(
        "next", description="the token after a window, or the next one at every position of it"
    )
    words: int = Field(0, ge=0, description="words in the vocabulary of a text; 0 = characters")
    tokenizer: str | None = Field(
        None, description="tokenizer.json of a text's tokens, or a folder of the hub with one"
    )
    shortest: int = Field(0, ge=0, description="characters that a role or file of a text must have")
    half: int = Field(0, ge=0, le=2, description="1 or 2: every second role or file of a text; 0 = all")
    by_length: bool = Field(False, description="batches of texts of similar length, with little padding")


class Split(Named):
    """How the samples are split over the clients; federation/splits.py defines each split under the same name."""

    name: str = Field("dirichlet", description="iid, dirichlet, lda, pathological, shards, natural or sizes")
    clients: int = Field(20, ge=0, le=1_000_000, description="number of clients m; 0 = one for each group (natural)")
    alpha: float | None = Field(None, gt=0, description="concentration (dirichlet, lda)")
    refill: bool | None = Field(None, description="draw with replacement (dirichlet)")
    min_size: int | None = Field(None, ge=1, description="smallest client (lda)")
    classes: int | None = Field(None, ge=1, description="classes of a client (pathological)")
    shards: int | None = Field(None, ge=1, description="shards of a client (shards)")
    stratified: bool | None = Field(None, description="equal class shares (iid)")
    sizes: list[float] | None = Field(None, description="relative sizes of the clients (sizes)")
    exponent: float | None = Field(None, description="power law of the sizes (sizes)")
    seed: int | None = Field(None, ge=0, description="seed of the partition; else the recipe's")
    draws: Draws = Field(
        "fedflat",
        description="how it is drawn: by fedflat, or as in the code of FedSoL, FedSMOO or MAN, index by index",
    )

    def options(self) -> dict[str, Any]:
        """The options of the split: all fields except name, clients, seed and draws."""
        return self.model_dump(exclude={"name", "clients", "seed", "draws"}, exclude_none=True)


class Lora(Section):
    """Low-rank adapters: the layers that have them, their size, and how the server averages them."""

    rank: int = Field(8, ge=1, description="rank r of a layer's correction BA")
    alpha: float | None = Field(None, gt=0, description="α of its factor α/r; else 2r")
    targets: str | list[str] = Field(
        "attention", description="layers with an adapter: attention, head, all, or names and patterns"
    )
    also: str | list[str] = Field([], description="layers or parameters that are trained in full")
    average: Literal["factors", "product"] = Field("factors", description="average A and B, or the products BA")

    def options(self) -> dict[str, Any]:
        """The arguments of `fedflat.models.lora`."""
        return self.model_dump(exclude={"average"})


class Model(Named):
    """The network, by its name in the catalogue or as the import path `package.module:Class` of your own."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str = Field("mlp", description="network, or package.module:Class; further fields are its options")
    buffers: BufferPolicy = Field("average", description="batch-norm statistics")
    base: str | None = Field(
        None, description="initial weights: a run, an export or a .safetensors file; default random"
    )
    base_sha256: str | None = Field(None, description="digest that the file of model.base must have")
    lora: Lora | None = Field(None, description="low-rank adapters to train in place of the network's weights")

    def options(self) -> dict[str, Any]:
        """The options passed to the network's constructor."""
        return dict(self.model_extra or {})
