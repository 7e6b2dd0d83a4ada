from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from fedflat.federation import Dataset, Federation, Samples
from fedflat.methods import Method
from fedflat.models import Network
from fedflat.randomness import Secret
from fedflat.recipe import SECTIONS, Local, Recipe
from fedflat.rounds import Problem


@pytest.fixture
def parts():
    samples = Samples(torch.ones(4, 2), torch.tensor([0, 1, 0, 1]))
    federation = Federation(Dataset("pairs", samples, samples, 2, (), ()), torch.arange(4).split(2))
    return federation, Network(nn.Linear(2, 2)), Method()


def test_no_setting_is_a_field_of_both_problem_and_recipe():
    own = {field.name for field in fields(Problem)} - {"method", "task"}  # the objects here, their text there
    inside = {name for section in SECTIONS for name in type(getattr(Recipe(), section)).model_fields}
    assert not own & (inside | Recipe.model_fields.keys())


def test_a_problem_of_a_few_settings_has_them_in_its_recipe(parts):
    settings = {"seed": 3, "buffers": "local", "group": 2, "measures": ["cosine"]}
    recipe = Problem.of(*parts, Local(lr=0.5), **settings, shuffle=False).recipe
    changed = {"seed": 3, "local": {"lr": 0.5}, "model": {"buffers": "local"}}
    changed |= {"engine": {"group": 2}, "evaluation": {"measures": ["cosine"]}}
    assert recipe == Recipe.model_validate(changed)
    assert Problem.of(*parts).recipe.evaluation.measures == []


def test_a_secret_takes_the_place_of_the_recipes_seed(parts):
    problem = Problem.of(*parts, seed=3)
    hidden = replace(problem, secret=Secret(7))
    assert (problem.seed, hidden.seed, hidden.recipe.seed) == (3, Secret(7), 3)
    assert isinstance(hidden.seed, Secret)


def test_clients_train_one_by_one_unless_the_recipe_says_how_many_share_a_step(parts):
    assert [Problem.of(*parts, group=group).group for group in (0, 1, 5)] == [1, 1, 5]
