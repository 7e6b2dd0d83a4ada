"""The papers' networks, and the user's own.

Every network here keeps three promises to the rest of the library:

* it ends in its head, an `nn.Linear` that is the last child; what enters the head is the feature vector;
* every activation is the output of its own activation module, so that a forward hook sees it (MAN needs this);
* it has no state but its parameters: weights alone are the model.

A grey image enters a network for colour images with its one channel repeated three times, as in the papers' code.
"""

from fedflat.models.adapters import factors, is_adapted, lora, merged
from fedflat.models.blocks import Activation, AttentionOutput, Colour, RectifiedPool
from fedflat.models.outputs import own_output, plain_output
from fedflat.models.registry import MODELS, build, construction
from fedflat.models.source_code import source
from fedflat.models.vector import ACTIVATIONS, Forward, Layout, Network, Tap, unit

__all__ = [
    "ACTIVATIONS",
    "MODELS",
    "Activation",
    "AttentionOutput",
    "Colour",
    "Forward",
    "Layout",
    "Network",
    "RectifiedPool",
    "Tap",
    "build",
    "construction",
    "factors",
    "is_adapted",
    "lora",
    "merged",
    "own_output",
    "plain_output",
    "source",
    "unit",
]
