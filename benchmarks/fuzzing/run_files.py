"""The files of a run's directory, spoilt and read by those who read them."""

import json
import shutil
from pathlib import Path
from random import Random

from fuzzing.files import File, spoilt_toml
from fuzzing.mutators import spoilt_bytes, spoilt_json
from fuzzing.targets import Target


class RunFile(File):
    """A file of a run's directory, read by those who read it."""

    share, name = 0.02, "run"
    files: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from fuzzing.runs import small_run

        self.sound = small_run(folder / "sound")
        self.contents = {name: (self.sound / name).read_bytes() for name in self.files}
        shutil.copytree(self.sound, self.path)

    def case(self, chance: Random) -> str:
        from fuzzing.runs import readers

        name = chance.choice(self.files)
        (self.path / name).write_bytes(self.of(chance, name, self.contents[name]))
        try:
            return chance.choice(readers(self.files))(self.path)
        finally:
            for each, content in self.contents.items():
                (self.path / each).write_bytes(content)

    def of(self, chance: Random, name: str, content: bytes) -> bytes:
        if name.endswith(".safetensors"):
            return spoilt_tensors(chance, content)
        if name.endswith(".toml"):
            return spoilt_toml(chance, content.decode())
        if name.endswith(".jsonl"):
            lines = content.splitlines()
            place = chance.randrange(len(lines))
            lines[place] = spoilt_json(chance, json.loads(lines[place]))
            return b"\n".join(lines) + chance.choice([b"\n", b""])
        return spoilt_json(chance, json.loads(content))


def spoilt_tensors(chance: Random, content: bytes) -> bytes:
    """A safetensors file with another header, or spoilt bytes."""
    if chance.random() < 0.4:
        return spoilt_bytes(chance, content)
    length = int.from_bytes(content[:8], "little")
    header = spoilt_json(chance, json.loads(content[8 : 8 + length]))
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


class CheckpointFile(RunFile):
    """A checkpoint: its manifest, forged or damaged, and its tensors."""

    share = 0.02

    def __init__(self, folder: Path) -> None:
        self.files = ("checkpoints/00000002.json", "checkpoints/00000002.server.safetensors",
                      "checkpoints/00000002.memory.0.safetensors")  # fmt: skip
        super().__init__(folder)

    def of(self, chance: Random, name: str, content: bytes) -> bytes:
        spoilt = super().of(chance, name, content)
        if chance.random() < 0.6:
            from fuzzing.runs import resealed

            return resealed(self.path, name, spoilt)
        return spoilt


class MetricsFile(RunFile):
    """The records of a run's rounds."""

    share, files = 0.02, ("metrics.jsonl",)


class ModelFile(RunFile):
    """A run's model, summary and recipe."""

    share, files = 0.02, ("model.safetensors", "summary.json", "recipe.toml")

    def of(self, chance: Random, name: str, content: bytes) -> bytes:
        spoilt = super().of(chance, name, content)
        if name == "model.safetensors" and chance.random() < 0.7:
            from fuzzing.runs import with_model

            with_model(self.path, spoilt)
        return spoilt


RUN_FILES: dict[str, type[Target]] = {
    "checkpoint": CheckpointFile,
    "metrics": MetricsFile,
    "model": ModelFile,
}
