"""The networks of the papers, and support for user-defined networks.

The rest of the library relies on three properties of the networks here:

* the last child is the head, an `nn.Linear`; the input of the head is the feature vector;
* every activation is the output of its own activation module, so that a forward hook sees it (MAN needs this);
* the parameters are the only state, so the weights define the model.

Networks for colour images repeat the channel of a grey image three times, as in the papers' code.
"""

from fedflat.models.adapters import Adapter, factors, is_adapted, lora, merged
from fedflat.models.blocks import Activation, AttentionOutput, Colour, Normalised, RectifiedPool
from fedflat.models.failures import explained
from fedflat.models.faster import faster_operations
from fedflat.models.layout import Layout
from fedflat.models.outputs import own_output, plain_output, with_plain_output
from fedflat.models.pooling import pool_library
from fedflat.models.products import by_onednn
from fedflat.models.registry import MODELS, OFFERED, build, construction, refuse_offered
from fedflat.models.sequential import written_layers
from fedflat.models.source_code import source
from fedflat.models.tap import ACTIVATIONS, Forward, Tap
from fedflat.models.twice import twice_differentiable
from fedflat.models.vector import Network, unit

__all__ = [
    "ACTIVATIONS",
    "MODELS",
    "OFFERED",
    "Activation",
    "Adapter",
    "AttentionOutput",
    "Colour",
    "Forward",
    "Layout",
    "Network",
    "Normalised",
    "RectifiedPool",
    "Tap",
    "build",
    "by_onednn",
    "construction",
    "explained",
    "factors",
    "faster_operations",
    "is_adapted",
    "lora",
    "merged",
    "own_output",
    "plain_output",
    "pool_library",
    "refuse_offered",
    "source",
    "twice_differentiable",
    "unit",
    "with_plain_output",
    "written_layers",
]
