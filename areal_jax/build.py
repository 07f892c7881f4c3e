"""The parts that both roles build from a config, so that trainer and samplers agree on them."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import ml_collections

from areal_jax import sharding
from areal_jax.data import arithmetic, tokenizer
from areal_jax.environments.single_turn import ENVIRONMENTS
from areal_jax.models.transformer import Model, TransformerConfig, build_model
from areal_jax.rewards.math import REWARDS
from areal_jax.rollout.engine import EngineConfig
from areal_jax.rollout.sampler import Grader
from areal_jax.transport.messages import Limits
from areal_jax.types import UserError


def cache_dir(config: ml_collections.ConfigDict) -> pathlib.Path:
    """Where generated data and warm starts are kept."""
    return pathlib.Path(config.data.cache_dir or pathlib.Path.home() / ".cache" / "areal_jax").expanduser()


def make_tokenizer(config: ml_collections.ConfigDict) -> Any:
    del config  # the embedded task has one
    return tokenizer.build_character_tokenizer(arithmetic.ALPHABET)


def make_model(config: ml_collections.ConfigDict, role: str, vocab_size: int) -> Model:
    """The policy on this process's mesh; role is 'trainer' or 'sampler'."""
    mesh = sharding.make_mesh(config.mesh[role].to_dict())
    options = config.model.to_dict()
    if options["compute_dtype"] == "auto":
        options["compute_dtype"] = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    key, rows = {
        "trainer": ("trainer.micro_batch_rows", config.trainer.micro_batch_rows),
        "sampler": ("rollout.slots", config.rollout.slots),
    }[role]
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    if rows % shards:
        raise UserError(f"{key} is {rows} and the {role}'s mesh has data x fsdp = {shards}: make it a multiple")
    return build_model(TransformerConfig(vocab_size=vocab_size, **options), mesh)


def engine_config(config: ml_collections.ConfigDict, eos_id: int) -> EngineConfig:
    """The sizes of a sampler's engine. Refills are compiled for 1/32, 1/8 and 1/2 of the slots (at least one each)
    and for the prompt's length, half and all of the longest sequence."""
    r = config.rollout
    longest = r.max_prompt_length + r.max_response_length
    rows = sorted({max(1, r.slots // 32), max(1, r.slots // 8), max(1, r.slots // 2)})
    lengths = sorted({r.max_prompt_length, max(r.max_prompt_length, longest // 2), longest})
    return EngineConfig(
        slots=r.slots,
        max_prompt_length=r.max_prompt_length,
        max_length=longest,
        chunk=r.chunk,
        row_ladder=tuple(rows),
        length_ladder=tuple(lengths),
        eos_ids=(eos_id,),
        kv_on_update=r.kv_on_update,
    )


def make_grader(config: ml_collections.ConfigDict, tok: Any) -> Grader:
    return Grader(ENVIRONMENTS[config.rollout.environment](REWARDS[config.reward.name]), tok)


def limits(config: ml_collections.ConfigDict) -> Limits:
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    return Limits(config.transport.max_message_bytes, longest)
