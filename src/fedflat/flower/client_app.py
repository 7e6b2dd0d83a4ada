"""The client's side of a deployment: a process that starts for every message, handles it and exits.

The client uses its own copy of the recipe and its own policy file. A message cannot change either.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

if TYPE_CHECKING:
    from fedflat.flower.own import DataHook
    from fedflat.flower.policy import Question
    from fedflat.recipe import Recipe

BESIDE: tuple[Question, ...] = ("gradient", "rise", "margin")  # questions that clients only answer in a simulation


def client_app(recipe: str | Path | Recipe, data: DataHook | None = None) -> ClientApp:
    """Create a ClientApp for a recipe.

    The node's config names the client (`client=3`, or Flower's `partition-id`), the directory in which its memory and
    its ledger outlive the node (`memory="/var/lib/fedflat"`) and its policy file (`policy="/etc/fedflat/policy.toml"`).
    Slow imports are deferred to the first message.

    Args:
        recipe: the client's own copy of the recipe.
        data: `data(client)` returns the client's own samples; without it, they are those of the recipe's split.
    """
    app = ClientApp()

    def answer(question: Question) -> Callable[[Message, Context], Message]:
        def answered(message: Message, context: Context) -> Message:
            from fedflat.flower import answers

            return answers.answered(question, message, context, recipe, data)

        return answered

    app.train()(answer("train"))
    app.query()(answer("hello"))
    for question in ("hessian", "curvature", *BESIDE):
        app.query(question)(answer(question))
    return app
