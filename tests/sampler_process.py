"""One process of a sampler whose trainer is played by a script.

`python -m tests.sampler_process ADDRESS N I AXIS DIRECTORY REPORTS`: process I of N, which have two devices together on
the mesh axis AXIS (one each, of two: with more, a CPU's collectives may lock up when work is queued). The weights are
in DIRECTORY/weights. After so many REPORTS process 0 writes what was in them to DIRECTORY/reported.json; each process
makes DIRECTORY/I.started after its first turn.
"""

import json
import pathlib
import sys
import traceback

import jax
import numpy as np

from areal_jax.launch.cluster import Cluster

PROMPTS = ([5, 6], [7], [5, 6, 8])


class Trainer:
    """Announces another version every few reports, and an evaluation of the one before."""

    def __init__(self, stop_after):
        self.reported, self._reports, self._stop_after = {}, 0, stop_after

    def exchange(self, report):
        from areal_jax.transport.messages import Reply
        from areal_jax.types import Lease, Prompt

        n, leases = self._reports, []
        self._reports += 1
        self.reported |= {t.sample_id: t for t in report.trajectories}
        if n % 3 == 0 and n < 30:
            prompt = Prompt(n, np.array(PROMPTS[n // 3 % len(PROMPTS)], np.int32), "", "")
            leases.append(Lease(prompt, tuple(range(4 * n, 4 * n + 4)), 0, None, 1.0, 18))
        if n == 12:
            prompt = Prompt(n, np.array([9, 4], np.int32), "", "")
            leases.append(Lease(prompt, (1 << 31, (1 << 31) + 1), 0, 1, 0.7, 18))
        return Reply(report.sequence, "run", min(2, n // 8), tuple(leases), 100, n >= self._stop_after)

    def close(self):
        pass


def run(host, axis, directory, reports):
    from areal_jax import sharding
    from areal_jax.models.transformer import build_model
    from areal_jax.rollout.programs import EngineConfig, make_program
    from areal_jax.rollout.sampler import Sampler
    from areal_jax.transport.broadcast import Broadcast, FollowingLink, LeadingLink
    from areal_jax.transport.messages import Limits
    from areal_jax.transport.weights import OrbaxChannel
    from areal_jax.types import NO_VERSION, PolicySnapshot
    from tests.helpers import TINY, Graded

    config = EngineConfig(
        slots=4, max_prompt_length=6, max_length=24, chunk=3, row_ladder=(4,), length_ladder=(24,), prefill_tokens=96,
        eos_ids=(1,), kv_on_update="recompute",
    )  # fmt: skip
    mesh = sharding.make_mesh({"data": 1, "fsdp": 1, "tensor": 1} | {axis: 2})
    model = build_model(TINY, mesh)
    broadcast = Broadcast(host) if jax.process_count() > 1 else None
    leads = broadcast is None or broadcast.leads
    channel = OrbaxChannel(directory / "weights", publishes=False)
    sampler = Sampler(
        "s", make_program(model, config), channel, Graded if leads else None, 0, deterministic=True, broadcast=broadcast
    )
    sampler.start(PolicySnapshot(NO_VERSION, model.init_params(0)))
    trainer = Trainer(stop_after=reports)
    link = trainer
    if broadcast is not None:
        link = LeadingLink(trainer, broadcast) if leads else FollowingLink(broadcast, Limits(1 << 20, 64))
    sampler.connect(link)
    while not sampler.turn()[1]:
        (directory / f"{jax.process_index()}.started").touch()
    sampler.close()
    if leads:
        reported = {
            i: [t.tokens.tolist(), t.policy_versions.tolist(), t.behaviour_logprobs.tolist()]
            for i, t in sorted(trainer.reported.items())
        }
        (directory / "reported.json").write_text(json.dumps(reported))
    if broadcast is not None:
        broadcast.close()


if __name__ == "__main__":
    address, processes, index, axis, directory, reports = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 2 // int(processes))
    cluster = Cluster(address if processes != "1" else "", int(processes), int(index))
    cluster.join()
    try:
        run(cluster.host, axis, pathlib.Path(directory), int(reports))
    except Exception:  # as main does
        traceback.print_exc()
        cluster.leave_failed()
        raise
