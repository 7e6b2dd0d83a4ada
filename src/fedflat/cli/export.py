"""Command to export a trained model: export."""

from pathlib import Path
from typing import Annotated

import typer

from fedflat.cli.app import TrustOption, app, err, out


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="directory of a finished run, or the manifest of one of its checkpoints")],
    directory: Annotated[
        Path | None, typer.Option("-o", "--out", help="directory to write; default RUN/export")
    ] = None,
    onnx: Annotated[bool, typer.Option(help="also write an ONNX file, which includes the normalisation")] = True,
    trust: TrustOption = False,
) -> None:
    """Write a run's model for use elsewhere: safetensors, ONNX, the network's code, a model card."""
    from fedflat.runs.export import export as write

    with err.status(f"{run}: exporting"):
        files = write(run, directory, onnx)
    for path, size in files.items():
        out.print(f"{path}  {size:,} bytes", markup=False, highlight=False, soft_wrap=True)
