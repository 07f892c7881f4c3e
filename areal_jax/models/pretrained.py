"""`model.path`: a local Hugging Face directory, a GGUF file, or a name on the hub, as one source of a model."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import pathlib
from typing import Any

from areal_jax.models.checkpoint_io import SafetensorsSource, load_params
from areal_jax.models.families import HfConfig, read_config
from areal_jax.models.gguf import GgufFile
from areal_jax.models.transformer import Model, TransformerConfig
from areal_jax.types import Params, UserError

SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
"""What describes a model and its tokenizer; samplers need no more than these."""

ALL_FILES = (*SMALL_FILES, "model*.safetensors")


PROBES = ("the sum of 12 and 3.5 is 15.5\n\nA:  yes", "  caf\u00e9 \u65e5\u672c\t{x}^2 don't")

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A pretrained model that has been found; nothing of its weights is read yet."""

    path: str
    """As configured."""
    revision: str
    local: pathlib.Path
    """A directory with config.json, or a GGUF file."""

    @property
    def where(self) -> str:
        """Its name on the hub, or its absolute path."""
        here = pathlib.Path(self.path).expanduser()
        return str(here.absolute()) if here.exists() else self.path

    @property
    def is_gguf(self) -> bool:
        return self.local.suffix == ".gguf"

    @functools.cached_property
    def _gguf(self) -> GgufFile:
        return GgufFile(self.local)

    @functools.cached_property
    def hf_config(self) -> HfConfig:
        """config.json, parsed."""
        if self.is_gguf:
            return self._gguf.config()
        return _read_json(self.local / "config.json")

    def config(self) -> TransformerConfig:
        """The decoder's config. Raises UserError for what is not supported."""
        return read_config(self.hf_config, str(self.local if self.is_gguf else self.local / "config.json"))

    @functools.cached_property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json, or {} where there is none."""
        path = self.local / "generation_config.json"
        return {} if self.is_gguf or not path.exists() else _read_json(path)

    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a response by the generation config, or by the config where it names none."""
        ids = self.generation_config.get("eos_token_id", self.hf_config.get("eos_token_id"))
        return tuple(ids) if isinstance(ids, list) else () if ids is None else (int(ids),)

    def tokenizer(self) -> Any:
        """The model's own tokenizer."""
        return self._gguf.tokenizer() if self.is_gguf else find_tokenizer(str(self.local))

    def load_params(self, model: Model) -> Params:
        """The weights, in the shards of the model's mesh. Downloads them if they are on the hub."""
        if self.is_gguf:
            return load_params(model, self._gguf)
        directory = self.local if pathlib.Path(self.path).expanduser().is_dir() else fetch(self.path, self.revision)
        return load_params(model, SafetensorsSource(directory))


def find(path: str, revision: str = "") -> Pretrained:
    """Locates a model; of one on the hub it downloads the small files.

    Raises UserError when there is none, saying where it looked.
    """
    local = pathlib.Path(path).expanduser()
    if local.is_file() and local.suffix == ".gguf":
        return Pretrained(path, revision, local)
    if local.is_dir():
        if not (local / "config.json").exists():
            raise UserError(f"model.path {path!r} is a directory without a config.json; expected a Hugging Face model")
        return Pretrained(path, revision, local)
    if local.suffix == ".gguf" or path.count("/") > 1 or path.startswith((".", "/", "~")):
        raise UserError(f"model.path {path!r} does not exist; expected a directory, a .gguf file or a name on the hub")
    return Pretrained(path, revision, fetch(path, revision, SMALL_FILES))


def find_tokenizer(path: str) -> Any:
    """The tokenizer of a directory, or of a name on the hub. Raises UserError if there is none.

    transformers chooses a class by the model's type, and some classes put their own splitting in the place of the
    file's: where the two disagree on PROBES, tokenizer.json is right.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    local = pathlib.Path(path).expanduser()
    directory = (
        local if local.is_dir() or path.startswith((".", "/", "~")) else fetch(path, "", SMALL_FILES, "model.tokenizer")
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory))
        if not (directory / "tokenizer.json").exists():
            return tokenizer
        plain = PreTrainedTokenizerFast.from_pretrained(str(directory))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"there is no tokenizer that can be loaded in {path}: {error}. Set model.tokenizer to a directory or a "
            "name on the hub that has one"
        ) from error
    if all(tokenizer.encode(probe) == plain.encode(probe) for probe in PROBES):
        return tokenizer
    log.warning("%s: %s contradicts tokenizer.json, which is used", path, type(tokenizer).__name__)
    return plain


def fetch(name: str, revision: str, patterns: tuple[str, ...] = ALL_FILES, key: str = "model.path") -> pathlib.Path:
    """A snapshot of a model on the hub, from huggingface_hub's cache where it is there (HF_HOME, HF_HUB_OFFLINE and
    HF_TOKEN have their usual meaning)."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        found = huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=list(patterns))
    except (OSError, HFValidationError, ValueError) as error:  # its errors of network, access and cache are OSErrors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{key} {name!r} is nothing on this machine, and the hub has not given it: {reason}. Check the name and "
            f"the network, or download it and set {key} to its directory"
        ) from error
    return pathlib.Path(found)


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); download it again") from error
