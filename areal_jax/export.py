"""`python -m areal_jax.export --workdir=runs/... --output=DIR`: a trained policy as a Hugging Face directory.

The directory holds config.json, model*.safetensors, the tokenizer and generation_config.json; transformers and
`model.path` load it as it is. Adapters (LoRA) are merged into the weights, or with --adapter written alone, as PEFT
loads them onto the model that they were trained on.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import sys
import uuid
from typing import Any

import ml_collections
import orbax.checkpoint as ocp
from absl import flags

from areal_jax import build, sharding
from areal_jax.config import unflatten
from areal_jax.models.checkpoint_io import save_adapters, save_params
from areal_jax.models.families import HfConfig, to_hf
from areal_jax.models.linear import LoraConfig, merge_adapters
from areal_jax.models.transformer import build_model
from areal_jax.trainer.checkpoint import REFERENCE, Checkpoints
from areal_jax.types import Params, UserError

WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run.")
OUTPUT = flags.DEFINE_string("output", None, "Directory to write; it must not exist, or be empty.")
STEP = flags.DEFINE_integer("step", None, "Training step of the checkpoint; the newest if not given.")
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the tensors; float32 loses nothing.")
ADAPTER = flags.DEFINE_bool("adapter", False, "Write the adapters of a run with LoRA alone, in PEFT's layout.")
MAX_SHARD_GB = flags.DEFINE_float("max_shard_gb", 5.0, "Most gigabytes of one safetensors file.", lower_bound=1e-6)


def export(
    workdir: pathlib.Path,
    output: pathlib.Path,
    step: int | None,
    dtype: str,
    max_shard_bytes: int,
    adapter: bool = False,
) -> int:
    """Writes the policy of a checkpoint, or its adapters alone; returns its step. Raises UserError, and leaves nothing
    half-written."""
    config = _config_of(workdir)
    output = output.expanduser().absolute()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output={output} exists and is not an empty directory: choose another")
    policy, lora = build.find_policy(config), build.lora_config(config)
    if adapter:
        _require_adapters(lora, policy, workdir)
    version, params = _params_of(workdir, step, policy, lora, adapter)
    temporary = output.with_name(f".{output.name}.{uuid.uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        if adapter and lora is not None and policy.pretrained is not None:
            source = policy.pretrained
            save_adapters(params, policy.config, lora, source.where, source.revision, temporary, dtype)
        else:
            save_params(params, policy.config, temporary, dtype, max_shard_bytes)
            _write_json(temporary / "config.json", hf_config(policy, dtype))
            _write_json(temporary / "generation_config.json", _generation_config(policy, config))
        policy.tokenizer.save_pretrained(temporary)
        if output.exists():
            output.rmdir()
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # not there any more if all went well
    return version


def _require_adapters(lora: LoraConfig | None, policy: build.Policy, workdir: pathlib.Path) -> None:
    """Raises UserError where there are no adapters, or nothing that PEFT could put them on."""
    if lora is None:
        raise UserError(f"--adapter: all parameters of {workdir} were trained (model.lora.rank is 0); leave it out")
    if policy.pretrained is None or policy.pretrained.is_gguf:
        base = policy.pretrained.path if policy.pretrained else "a new model"
        raise UserError(
            f"--adapter: the adapters of {workdir} are of {base}, which is no Hugging Face model that PEFT could put "
            "them on; leave it out, and they are merged"
        )


def hf_config(policy: build.Policy, dtype: str) -> HfConfig:
    """config.json of the policy: its own if it came from a hub, else that of a family with the same options."""
    if policy.pretrained is not None:
        hf = {k: v for k, v in policy.pretrained.hf_config.items() if k not in ("torch_dtype", "_name_or_path")}
    else:
        hf = to_hf(policy.config) | {"bos_token_id": None, "eos_token_id": policy.tokenizer.eos_token_id}
        hf |= {"pad_token_id": policy.tokenizer.pad_token_id}
    return hf | {"dtype": dtype}


def _generation_config(policy: build.Policy, config: ml_collections.ConfigDict) -> dict[str, Any]:
    """The model's own, with what ends a response here and the temperature that the policy was trained at."""
    own = policy.pretrained.generation_config if policy.pretrained is not None else {}
    ids = list(policy.stop_ids)
    return {
        **own,
        "do_sample": True,
        "temperature": config.rollout.temperature,
        "eos_token_id": ids[0] if len(ids) == 1 else ids,
        "pad_token_id": own.get("pad_token_id", policy.tokenizer.pad_token_id),
    }


def _config_of(workdir: pathlib.Path) -> ml_collections.ConfigDict:
    """The config that a run was started with. Raises UserError if there is no run."""
    path = workdir / "config.json"
    if not path.exists():
        raise UserError(f"--workdir={workdir} holds no run (no config.json)")
    return unflatten(json.loads(path.read_text())["config"])


def _params_of(
    workdir: pathlib.Path, step: int | None, policy: build.Policy, lora: LoraConfig | None, adapter: bool
) -> tuple[int, Params]:
    """(step, the policy's parameters with adapters merged in, or its adapters alone) of a checkpoint, spread over this
    process's devices."""
    checkpoints = Checkpoints(workdir / "checkpoints")
    available = checkpoints.versions()
    if not available:
        raise UserError(f"{workdir} has no checkpoint yet (checkpoint.every_steps, or the end of the run, makes one)")
    version = available[-1] if step is None else step
    if version not in available:
        raise UserError(f"--step={version} has no checkpoint in {workdir}; there are {available}")
    mesh = sharding.make_mesh({"data": 1, "fsdp": -1, "tensor": 1})
    model = build_model(dataclasses.replace(policy.config, lora=lora), mesh)
    like = {"params": model.split(model.abstract_params)[1]}
    args = ocp.args.PyTreeRestore(
        item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like), partial_restore=True
    )
    restored = ocp.PyTreeCheckpointer().restore(workdir.absolute() / "checkpoints" / str(version) / "state", args=args)
    if lora is None or adapter:
        return version, restored["params"]
    kept = workdir / "checkpoints" / REFERENCE
    if not kept.exists():
        raise UserError(f"{kept} is gone, which the adapters of {workdir} are of: only --adapter can be written")
    return version, merge_adapters(checkpoints.restore_reference(model.abstract_base), restored["params"], lora)


def _write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    try:
        try:
            rest = flags.FLAGS(argv)
        except flags.Error as error:
            raise UserError(str(error)) from error
        if len(rest) > 1:
            raise UserError(f"unexpected argument {rest[1]!r}")
        if not WORKDIR.value or not OUTPUT.value:
            raise UserError("expected --workdir=DIR of a run and --output=DIR")
        output = pathlib.Path(OUTPUT.value)
        workdir, limit = pathlib.Path(WORKDIR.value).expanduser(), int(MAX_SHARD_GB.value * 1e9)
        version = export(workdir, output, STEP.value, DTYPE.value, limit, ADAPTER.value)
    except UserError as error:
        print(f"areal_jax: error: {error}", file=sys.stderr)
        return 1
    what = "the adapters" if ADAPTER.value else "the policy"
    print(f"{output} has {what} after step {version} of {workdir}")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when jax first looks for devices
    sys.exit(main(sys.argv))
