"""The catalogue: each method's name, its chain of parts, its paper and its idea.

Where published versions of a method differ, the default follows the paper and the other version is an option; the pages
in docs/methods give the details. Importing a module of this folder lists its methods.
"""

from fedflat.methods.catalogue import baselines, defences, flat, optimisers, privacy
from fedflat.methods.catalogue.entry import CATALOGUE, CHOICES, PAPERS, Entry

__all__ = ["CATALOGUE", "CHOICES", "PAPERS", "Entry", "baselines", "defences", "flat", "optimisers", "privacy"]
