"""The records that travel round the ring: prompt -> lease -> trajectory -> training batch.

Every array that describes tokens follows one rule: **index t describes tokens[t]**. Prompt positions are masked
(`loss_mask` 0), carry behaviour log-prob 0 and policy version -1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

FinishReason = Literal["stop", "length"]
Params = Any
"""A nested dict of arrays: the trainable parameters of one policy."""

PROMPT_VERSION = -1
"""The policy version recorded at prompt positions, which no policy produced."""

NO_VERSION = -1
"""Of parameters that no trainer published: every published version is newer."""


class Output(NamedTuple):
    """A policy's last layer, apart from the others: which tokens it is applied to is for the caller to say."""

    project: Callable[[Any, jax.Array], jax.Array]
    """(weights, hidden [..., D]) -> next-token logits [..., V], float32."""
    weights: Any


class UserError(Exception):
    """Something the user can put right: shown as one message, without frames, and ends the process with code 1."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One problem to answer."""

    prompt_id: int
    """Unique in a run: the position in the prompt stream. Keys the group of samples drawn for it."""
    tokens: np.ndarray
    """int32 [P]: the tokenised prompt."""
    text: str
    """The prompt as text."""
    answer: str
    """The reference answer that the reward compares with."""


@dataclasses.dataclass(frozen=True)
class Lease:
    """Permission for a sampler to draw the samples of one prompt."""

    prompt: Prompt
    sample_ids: tuple[int, ...]
    """One id per sample; a sample's random keys derive from its id."""
    min_version: int
    """The samples may start only under parameters at least this new (what makes max_staleness 0 synchronous)."""
    pinned_version: int | None
    """Evaluation: draw every token with exactly this version. None for training samples."""
    temperature: float
    """Softmax temperature; 0 is greedy."""
    max_new_tokens: int
    """Most response tokens, the end-of-sequence token included."""


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One finished sample: prompt and response in a single sequence of T tokens."""

    sample_id: int
    prompt_id: int
    tokens: np.ndarray
    """int32 [T]: prompt, then response; the end-of-sequence token, where drawn, is part of the response."""
    behaviour_logprobs: np.ndarray
    """float32 [T]: log-probs under the distribution sampled, temperature included; 0 on the prompt."""
    policy_versions: np.ndarray
    """int32 [T]: the version of the parameters that produced each token; -1 on the prompt."""
    loss_mask: np.ndarray
    """float32 [T]: 1 on response tokens that count, else 0."""
    finish_reason: FinishReason
    reward: float
    evaluation: bool = False
    """True for samples drawn to measure a pinned version; they are never trained on."""

    @property
    def prompt_length(self) -> int:
        return int(np.count_nonzero(self.policy_versions == PROMPT_VERSION))

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def response_tokens(self) -> np.ndarray:
        """int32 [T - P]."""
        return self.tokens[self.prompt_length :]

    def oldest_version(self) -> int:
        """The oldest policy version among the response tokens."""
        return int(self.policy_versions[self.prompt_length :].min())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """Packed sequences of one optimiser minibatch, as recorded: M micro-batches of R rows of L tokens.

    M is the static upper bound; only the first `micro_batches` carry data. Several sequences share a row, told apart by
    `segment_ids`; sequences never lie across the end of a row.
    """

    tokens: Any
    """int32 [M, R, L]."""
    segment_ids: Any
    """int32 [M, R, L]: 1, 2, ... within a row; 0 is padding."""
    positions: Any
    """int32 [M, R, L]: position within the sequence, restarting at 0 for each."""
    loss_mask: Any
    """float32 [M, R, L]."""
    behaviour_logprobs: Any
    """float32 [M, R, L]."""
    policy_versions: Any
    """int32 [M, R, L]."""
    micro_batches: Any
    """int32 scalar: how many of the M micro-batches are in use."""
    halvings: Any
    """int32 [M]: h where no sequence lies across the ends of the 2^h equal parts of a row; these are then computed as
    rows of their own."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Targets:
    """What the trainer works out for the tokens of a TrainBatch before its update; each float32 [M, R, L].

    None is what the run's configuration does not need.
    """

    advantages: Any
    proximal_logprobs: Any = None
    """Under the policy just before the training step."""
    reference_logprobs: Any = None
    """Under the policy that RL started from."""
    values: Any = None
    """The critic's, before the step."""
    returns: Any = None
    """What the critic is fitted to."""


@dataclasses.dataclass(frozen=True)
class PolicySnapshot:
    """Parameters and the version that they are."""

    version: int
    params: Params
