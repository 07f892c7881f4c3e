"""`python -m areal_jax.main --config=configs/math.py`: flags, role, logging."""

from areal_jax.launch import processes

processes.enter_child()  # before jax: a supervised child takes its cores first

import difflib  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import pathlib  # noqa: E402
import re  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from typing import Any  # noqa: E402

import ml_collections  # noqa: E402
from absl import flags  # noqa: E402
from ml_collections import config_flags  # noqa: E402

from areal_jax import config as config_lib  # noqa: E402
from areal_jax import workdir as workdir_lib  # noqa: E402
from areal_jax.launch import local  # noqa: E402
from areal_jax.launch.cluster import Cluster  # noqa: E402
from areal_jax.metrics import Record  # noqa: E402
from areal_jax.terminal import make_view  # noqa: E402
from areal_jax.types import UserError  # noqa: E402

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Path of a config, with an optional :preset.", lock_config=True
)
ROLE = flags.DEFINE_enum(
    "role", "", ["", "trainer", "sampler"], "'' runs everything; a role runs that part alone, for launching by hand."
)
SAMPLER_INDEX = flags.DEFINE_integer("sampler_index", 0, "Number of this sampler, unique among them.", lower_bound=0)
COORDINATOR = flags.DEFINE_string(
    "coordinator_address", "", "HOST:PORT of process 0, for a --role with several processes."
)
NUM_PROCESSES = flags.DEFINE_integer("num_processes", 1, "How many processes this --role has.", lower_bound=1)
PROCESS_ID = flags.DEFINE_integer("process_id", 0, "Which of them this one is.", lower_bound=0)
DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the mesh and the memory per device, read no weights, and end.")
TRAINER_SLICE = flags.DEFINE_string("trainer_slice", "", "--dry_run: the trainer's devices as COUNTxGIB, e.g. 8x80.")
SAMPLER_SLICE = flags.DEFINE_string("sampler_slice", "", "--dry_run: the samplers' devices, likewise.")
DEBUG = flags.DEFINE_bool("debug", False, "Show the frames of an error.")


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    supervised, cluster = processes.supervised(), Cluster()
    try:
        config, overrides = _parse(argv)
        config_lib.validate(config)
        config_lib.refuse_idle_overrides(config, overrides)
        cluster = Cluster(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value)
        cluster.check(ROLE.value)
        if DRY_RUN.value:
            from areal_jax import plan

            kind = local.choose_kind(config.launch.kind, local.accelerators())
            print(plan.run(config, TRAINER_SLICE.value, SAMPLER_SLICE.value, kind))
            return 0
        follows = ROLE.value == "sampler" or PROCESS_ID.value > 0
        if follows and not config.workdir:
            raise UserError(
                "a sampler, and a process_id over 0, need the trainer's --config.workdir, where weights lie"
            )
        workdir = workdir_lib.choose(config)
        if not supervised and not follows:
            workdir_lib.prepare(workdir, config, overrides)
            held = workdir_lib.lock(workdir)  # noqa: F841 - until this process ends
        logging.basicConfig(level=logging.INFO if supervised else logging.WARNING, format="%(asctime)s %(message)s")
        logging.getLogger("absl").setLevel(logging.WARNING)
        cluster.join()
        return _run(config, workdir, argv[1:], supervised, cluster)
    except KeyboardInterrupt:
        print(
            "\ninterrupted; the same command with the same --config.workdir goes on from its last checkpoint",
            file=sys.stderr,
        )
        cluster.leave_failed(130)
        return 130
    except Exception as error:  # top of the process
        traceback_text = traceback.format_exc()
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        if supervised:
            print(traceback_text, file=sys.stderr)
            print(json.dumps({"kind": "failure", "text": text}), flush=True)
        else:
            debug = flags.FLAGS.is_parsed() and DEBUG.value
            print(traceback_text if debug else f"areal_jax: error: {text}", file=sys.stderr)
        cluster.leave_failed()
        return 1


def _run(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, arguments: list[str], supervised: bool, cluster: Cluster
) -> int:
    if ROLE.value == "sampler":
        from areal_jax import sample

        sample.run(config, workdir, SAMPLER_INDEX.value, cluster.host)
        return 0
    if ROLE.value == "trainer" and cluster.process_id > 0:
        from areal_jax import train

        train.run(config, workdir, lambda record: None, colocated=False, host=cluster.host)
        return 0
    if ROLE.value == "trainer" and supervised:
        from areal_jax import train

        summary = train.run(config, workdir, _say, colocated=False)
        _say({"kind": "done", "text": summary["closing"]})
        return 0
    devices = local.accelerators()
    kind = local.choose_kind(config.launch.kind, devices)
    view = make_view()
    try:
        if ROLE.value == "" and kind == "local":
            closing = local.run(config, workdir, arguments, devices, view)
        else:
            from areal_jax import train

            closing = train.run(config, workdir, view, colocated=ROLE.value == "", host=cluster.host)["closing"]
    finally:
        view.close()
    print("\n" + closing)
    return 0


def _parse(argv: list[str]) -> tuple[ml_collections.ConfigDict, dict[str, Any]]:
    """The config with its overrides. Raises UserError for what does not parse, with the nearest right name."""
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        lines = str(error).strip().splitlines()  # an error inside a config file carries its frames: show the last line
        raise UserError(lines[-1] if "Traceback (most recent call last):" in lines else str(error)) from error
    except (AttributeError, KeyError) as error:
        raise UserError(_unknown_key(argv, error)) from error
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"cannot read the config: {error}") from error
    if len(rest) > 1:
        raise UserError(f"unexpected argument {rest[1]!r}")
    if CONFIG.value is None:
        raise UserError("no config: pass --config=configs/math.py")
    return CONFIG.value, dict(config_flags.get_override_values(flags.FLAGS["config"]))


def _unknown_key(argv: list[str], error: Exception) -> str:
    """Names the override whose key does not exist, and the nearest that does."""
    from configs import default

    known = list(config_lib.flatten(default.get_config()))
    for argument in argv[1:]:
        match = re.match(r"--?config\.([\w.]+)", argument)
        if match and match[1] not in known:
            near = difflib.get_close_matches(match[1], known, n=1, cutoff=0.4)
            return f"unknown key config.{match[1]}" + (f"; did you mean config.{near[0]}?" if near else "")
    return f"cannot read the config: {error}"


def _say(record: Record) -> None:
    """A supervised child's record, to its parent."""
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
