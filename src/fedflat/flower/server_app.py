"""The server's side of a deployment: a process that starts or resumes a run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedflat.errors import FedflatError

if TYPE_CHECKING:
    from fedflat.flower.own import DataHook
    from fedflat.recipe import Recipe


def server_app(recipe: str | Path | Recipe, data: DataHook | None = None) -> ServerApp:
    """Create a ServerApp for a recipe. `flwr run` starts it, or resumes the run in its directory.

    The run config has `out` (the directory, which `fedflat watch` can read), `keys` (the folder with the clients'
    public keys, which identify the nodes) and `set` (`section.field=value …`, for fields that concern only the server).
    Slow imports are deferred to the start, because clients import this package too.

    Args:
        recipe: the recipe of the deployment.
        data: `data(-1)` returns what the server may see: the shape of the samples, and a test part to score the model
            on.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        logging.getLogger("flwr").addFilter(OneSentence())
        from fedflat.flower.service import changed, serve

        config = context.run_config
        keys = Path(str(config["keys"])) if config.get("keys") else None
        chosen = changed(recipe, str(config.get("set", "")))
        serve(grid, chosen, Path(str(config.get("out", "run"))), data, keys)

    return app


class OneSentence(logging.Filter):
    """Flower logs what a ServerApp raises with its traceback. A mistake of the user is logged as its sentence alone."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep every record, and shorten those of a `FedflatError`."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, FedflatError):
            record.msg, record.args, record.exc_info = f"fedflat: {error}", None, None
        return True
