"""The parts that both roles build from a config, so that trainer and samplers agree on them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_collections
from jax.sharding import Mesh

from areal_jax import sharding
from areal_jax.config import SHAPE_KEYS, flatten
from areal_jax.data import arithmetic
from areal_jax.data.sources import Source, SourceConfig, open_source, without_first
from areal_jax.data.templates import Template, TemplateConfig
from areal_jax.data.tokenizer import build_character_tokenizer
from areal_jax.environments.single_turn import ENVIRONMENTS
from areal_jax.models import pretrained
from areal_jax.models.decode_kernels import BEST_DECODE, DECODE_KERNELS
from areal_jax.models.kernels import BEST, KERNELS
from areal_jax.models.linear import LoraConfig
from areal_jax.models.transformer import Model, Rope, TransformerConfig, build_model
from areal_jax.rewards.math import REWARDS
from areal_jax.rewards.pool import PoolConfig
from areal_jax.rollout.blocks import Paging
from areal_jax.rollout.grading import Grader, GradingConfig
from areal_jax.rollout.programs import EngineConfig, Program, make_program
from areal_jax.rollout.sampling import Filter
from areal_jax.rollout.stopping import StopStrings
from areal_jax.transport.broadcast import Broadcast, agree
from areal_jax.transport.messages import Limits
from areal_jax.transport.weights import PartChannel, WeightChannel
from areal_jax.types import Params, UserError
from areal_jax.workdir import differing_key

LONG, LONG_PROMPT = 1024, 64
"""Tokens of a sequence, and of a prompt, from which on another length of refills is worth its compilation."""

PAGED_SHARE = 0.4
"""Tokens of a paged cache, by default, of those of a dense one. With a long tail about a quarter are alive at once."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """What is known of the policy before its weights are read."""

    pretrained: pretrained.Pretrained | None
    """Where it comes from; None for a new model."""
    tokenizer: Any
    config: TransformerConfig
    """compute_dtype is still to be chosen, by the backend."""
    stop_ids: tuple[int, ...]
    """Tokens that end a response."""


def cache_dir(config: ml_collections.ConfigDict) -> pathlib.Path:
    """Where generated data and warm starts are kept."""
    return pathlib.Path(config.data.cache_dir or pathlib.Path.home() / ".cache" / "areal_jax").expanduser()


def require_same(broadcast: Broadcast | None, config: ml_collections.ConfigDict) -> None:
    """Raises UserError, in the other processes of a role, where their config is not process 0's."""
    mine = json.loads(json.dumps(flatten(config)))
    theirs = agree(broadcast, mine)
    key = differing_key(mine, theirs)
    if key is not None:
        raise UserError(
            f"config.{key} is {mine.get(key)!r} here and {theirs.get(key)!r} in process 0: start all processes of a "
            "role with the same config"
        )


def find_model(config: ml_collections.ConfigDict) -> tuple[pretrained.Pretrained | None, TransformerConfig]:
    """The model that `config.model` names, as far as its config says; (None, shape) for a new one.

    Raises UserError for a model that is not there or not supported, or for sequences longer than it was made for.
    """
    m = config.model
    if not m.path:
        shape = {name: m[name] for name in SHAPE_KEYS}
        vocabulary = len(build_character_tokenizer(arithmetic.ALPHABET))
        return None, TransformerConfig(vocab_size=vocabulary, rope=Rope(m.rope_base), **shape)
    found = pretrained.find(m.path, m.revision)
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    context = found.hf_config.get("max_position_embeddings")
    if context and longest > context:
        raise UserError(
            f"rollout.max_prompt_length + max_response_length = {longest} tokens, and {m.path} was made for {context} "
            "(max_position_embeddings): shorten them"
        )
    return found, found.config()


def find_policy(config: ml_collections.ConfigDict) -> Policy:
    """The model of `find_model` with its tokenizer and what ends a response. Raises UserError as that does."""
    found, model_config = find_model(config)
    if found is None:
        tokenizer = build_character_tokenizer(arithmetic.ALPHABET)
        return Policy(None, tokenizer, model_config, (tokenizer.eos_token_id,))
    name = config.model.tokenizer
    tokenizer = pretrained.find_tokenizer(name) if name else found.tokenizer()
    ids = {*found.stop_ids(), *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
    if not ids and not config.rollout.stop_strings:
        raise UserError(
            f"{config.model.path} names no end-of-sequence token, in its config or its tokenizer: set "
            "rollout.stop_strings"
        )
    return Policy(found, tokenizer, model_config, tuple(sorted(ids)))


def make_model(config: ml_collections.ConfigDict, role: str, policy: Policy) -> Model:
    """The policy on this process's mesh; role is 'trainer' or 'sampler'."""
    mesh = sharding.make_mesh(config.mesh[role].to_dict())
    return model_on(mesh, config, role, policy.config, on_cpu=jax.default_backend() == "cpu")


def model_on(
    mesh: Mesh, config: ml_collections.ConfigDict, role: str, model_config: TransformerConfig, on_cpu: bool
) -> Model:
    """A model on a given mesh, with its adapters. What a trainer trains is float32; a sampler keeps its matrices, and a
    trainer those under adapters, as it computes."""
    dtype = config.model.compute_dtype
    if dtype == "auto":
        dtype = "float32" if on_cpu else "bfloat16"
    slots, shards = config.rollout.slots, sharding.row_shards(mesh)
    samples = role == "sampler" or config.warm_start.enabled or config.launch.kind == "colocated"
    if samples and slots % shards:
        raise UserError(
            f"rollout.slots is {slots} and the {role}'s mesh has data x fsdp = {shards}: make it a multiple"
        )
    if samples and config.rollout.cache == "paged" and shards > 1:
        raise UserError(
            f"rollout.cache is 'paged' and the {role}'s mesh, on which samples are drawn, has data x fsdp = {shards}: "
            "a pool of blocks is not split over these. Give it tensor alone (with launch.samplers for more; a trainer "
            "draws for the warm start and when colocated), or use the dense cache"
        )
    tensor = mesh.shape["tensor"]
    for name in ("heads", "kv_heads", "d_ff"):
        size = getattr(model_config, name)
        if size % tensor:
            raise UserError(
                f"mesh.{role}.tensor is {tensor} and does not divide the model's {name} = {size}: choose one that does"
            )
    t = config.trainer
    if role == "trainer" and t.row_length % (mesh.shape["context"] << t.row_halvings):
        raise UserError(
            f"trainer.row_length is {t.row_length}, and the mesh's context is {mesh.shape['context']} and "
            f"trainer.row_halvings {t.row_halvings}: make it a multiple of context x 2^row_halvings"
        )
    if t.scan_layers and len(set(model_config.windows)) > 1:
        raise UserError(
            f"trainer.scan_layers is True and {config.model.path} has layers with and without a sliding window: only "
            "layers that are alike can be looped over; set it to False"
        )
    adapters = lora_config(config)
    model_config = dataclasses.replace(
        model_config,
        compute_dtype=dtype,
        attention=attention_kernel(config.model.attention, mesh, on_cpu, dtype),
        decode_attention=decode_kernel(config.model.decode_attention, on_cpu, model_config.head_dim),
        remat=t.remat,
        scan_layers=t.scan_layers,
        lora=adapters,
    )
    return build_model(model_config, mesh, "float32" if role == "trainer" and not adapters else dtype)


def attention_kernel(name: str, mesh: Mesh, on_cpu: bool, dtype: str) -> str:
    """What `config.model.attention` stands for. Raises UserError for a kernel that cannot run on the devices or in the
    dtype of computation, whose package is missing, or that does not split rows as the mesh does."""
    name = _kernel("model.attention", name, KERNELS, BEST, on_cpu)
    if name == "xla":
        return name
    kernel = KERNELS[name]
    if importlib.util.find_spec(kernel.package) is None and not _plans_elsewhere(on_cpu):
        raise UserError(
            f"model.attention is {name!r}, which needs the package {kernel.package}: pip install -r "
            "requirements-extra.txt"
        )
    if dtype not in kernel.dtypes:
        raise UserError(
            f"model.attention is {name!r}, which computes in {' or '.join(kernel.dtypes)}, and the model in {dtype}: "
            "change model.compute_dtype, or take another"
        )
    if mesh.shape["context"] > 1 and not kernel.splits_rows:
        raise UserError(
            f"model.attention is {name!r}, which has rows whole, and the mesh's context is {mesh.shape['context']}: "
            "set it to 1, or model.attention='xla'"
        )
    return name


def decode_kernel(name: str, on_cpu: bool, head_dim: int) -> str:
    """What `config.model.decode_attention` stands for. Raises UserError for kernels that cannot run on the devices, or
    do not have the model's features per head."""
    name = _kernel("model.decode_attention", name, DECODE_KERNELS, BEST_DECODE, on_cpu)
    if name != "xla" and head_dim & (head_dim - 1):
        raise UserError(
            f"model.decode_attention is {name!r}, which wants heads of a power of two features, and the model's have "
            f"{head_dim}: set it to 'xla'"
        )
    return name


def _kernel(key: str, name: str, kernels: Mapping[str, Any], best: Mapping[str, str], on_cpu: bool) -> str:
    platform = "cpu" if on_cpu else "" if _plans_elsewhere(on_cpu) else jax.default_backend()
    possible = ["xla", *(n for n, k in kernels.items() if platform in k.platforms)]
    if name not in ("auto", *possible) and not _plans_elsewhere(on_cpu):
        raise UserError(f"{key} is {name!r} and the devices are {platform}: expected one of {possible}")
    return best.get(platform, "xla") if name == "auto" else name


def _plans_elsewhere(on_cpu: bool) -> bool:
    """Whether this is a plan, made on another machine than the run's."""
    return not on_cpu and jax.default_backend() == "cpu"


def lora_config(config: ml_collections.ConfigDict) -> LoraConfig | None:
    """The adapters that `config.model.lora` asks for; the configs of earlier runs do not have it."""
    lora = config.model.get("lora")
    return LoraConfig(**lora.to_dict()) if lora and lora.rank else None


def weight_channel(model: Model, channel: WeightChannel, read_base: Callable[[Params], Params]) -> WeightChannel:
    """The channel itself or, with LoRA, one in which adapters alone travel; read_base: what they adapt, laid out as its
    argument says."""
    return PartChannel(channel, model.split, model.join, read_base) if model.config.lora else channel


def make_sampling_program(config: ml_collections.ConfigDict, model: Model, policy: Policy) -> Program:
    """The engine's functions, with the stop strings of the config."""
    strings = tuple(config.rollout.stop_strings)
    stop = StopStrings(strings, policy.tokenizer.decode) if strings else None
    sizes = engine_config(config, policy.stop_ids, sharding.row_shards(model.mesh))
    return make_program(model, sizes, stop)


def engine_config(config: ml_collections.ConfigDict, stop_ids: tuple[int, ...], row_shards: int) -> EngineConfig:
    """The sizes of a sampler's engine.

    Refills are compiled for 1/32, 1/8 and 1/2 of the slots (at least one each) and for the prompt's length (three
    quarters too, of LONG_PROMPT ones), half and all of the longest sequence (a quarter too, of LONG ones), as far as
    rollout.prefill_tokens allows; decode for all slots and, with rollout.compaction, for a quarter and a half, where
    those divide over `row_shards` devices.
    """
    r = config.rollout
    longest = r.max_prompt_length + r.max_response_length
    parts = (4, 2, 1) if longest >= LONG else (2, 1)
    lengths = {r.max_prompt_length, *(max(r.max_prompt_length, longest // n) for n in parts)}
    if r.max_prompt_length >= LONG_PROMPT:
        lengths.add(3 * r.max_prompt_length // 4)
    lengths = {min(n, r.prefill_tokens) for n in lengths}  # what is longer goes in pieces
    rows = {max(1, r.slots // 32), max(1, r.slots // 8), max(1, r.slots // 2)}
    if min(rows) * max(lengths) > r.prefill_tokens:
        rows.add(r.prefill_tokens // max(lengths))
    fewer = {r.slots // 4, r.slots // 2} if r.compaction and r.batching == "continuous" else set()
    return EngineConfig(
        slots=r.slots,
        max_prompt_length=r.max_prompt_length,
        max_length=longest,
        chunk=r.chunk,
        row_ladder=tuple(sorted(rows)),
        length_ladder=tuple(sorted(lengths)),
        prefill_tokens=r.prefill_tokens,
        eos_ids=stop_ids,
        kv_on_update=r.kv_on_update,
        paging=_paging(r, longest) if r.cache == "paged" else None,
        fewer=tuple(sorted(n for n in fewer if n and n % row_shards == 0)),
        kept=Filter(r.top_k, r.top_p, r.min_p),
        static=r.batching == "static",
    )


def _paging(rollout: ml_collections.ConfigDict, longest: int) -> Paging:
    size = min(rollout.block_size, max(1, longest // 8))
    size = 1 << (size.bit_length() - 1)  # kernels want a power of two
    tokens = rollout.cache_tokens or max(PAGED_SHARE * rollout.slots * longest, longest + size)
    return Paging(blocks=int(tokens // size), block_size=size)


def make_grader(config: ml_collections.ConfigDict, policy: Policy) -> Grader:
    r = config.reward
    pool = PoolConfig(r.workers, r.timeout_seconds, r.memory_mb)
    grading = GradingConfig(r.correct, r.incorrect, r.grade_truncated, pool)
    return Grader(ENVIRONMENTS[config.rollout.environment](REWARDS[r.name]), policy.tokenizer, grading)


def open_data(
    config: ml_collections.ConfigDict, splits: set[str], policy: Policy
) -> tuple[dict[str, Source], Template]:
    """The problems of the splits, and the template of their prompts; its examples are taken out of 'train'."""
    d = config.data
    source_config = SourceConfig(
        name=d.name, path=d.path, heldout_path=d.heldout_path, question_key=d.question_key, answer_key=d.answer_key,
        train_split=d.train_split, validation_split=d.validation_split, test_split=d.test_split,
        test_fraction=d.test_fraction, validation_fraction=d.validation_fraction, cache_dir=cache_dir(config),
    )  # fmt: skip
    sources = {split: open_source(source_config, split) for split in splits}
    train = sources["train"]
    if d.shots >= len(train):
        raise UserError(
            f"data.shots is {d.shots} and the training split has {len(train)} problems: take fewer examples"
        )
    template = Template(
        TemplateConfig(d.template, d.question_format, d.shot_format, d.system_prompt),
        policy.tokenizer,
        [train[i] for i in range(d.shots)],
        policy.config.vocab_size,
    )
    return sources | {"train": without_first(train, d.shots)}, template


def limits(config: ml_collections.ConfigDict) -> Limits:
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    return Limits(config.transport.max_message_bytes, longest)
