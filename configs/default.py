"""Every configuration key, with its unit and range. Presets (configs/math.py) change values, never add keys.

`areal_jax/config.py` enforces the ranges and the conditions between keys at start-up.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The defaults: the embedded arithmetic task at the size of a laptop."""
    c = ml_collections.ConfigDict()
    c.preset = "tiny"  # name of the preset that made this config; set by configs/math.py
    c.workdir = ""  # where the run's files go; '' makes runs/<preset>-<time>
    c.seed = 0  # int >= 0: initialisation, order of problems, sampling

    c.model = ml_collections.ConfigDict()
    c.model.path = ""  # a Hugging Face directory, a hub name or a .gguf file; '': a new model of the shape below
    c.model.revision = ""  # of a model on the hub: branch, tag or commit; '' is its default
    c.model.tokenizer = ""  # a directory or a name on the hub; '' takes the model's own
    # the shape of a new model; with model.path it comes from there
    c.model.layers = 2  # >= 1
    c.model.d_model = 128  # features, >= 1
    c.model.heads = 8  # query heads, a multiple of kv_heads
    c.model.kv_heads = 8  # key and value heads, >= 1
    c.model.head_dim = 16  # features per head, even
    c.model.d_ff = 256  # features of the feed-forward, >= 1
    c.model.rope_base = 1000.0  # base of the rotary frequencies, > 1
    c.model.norm_eps = 1e-6  # > 0
    c.model.qkv_bias = False
    c.model.qk_norm = False
    c.model.tied_embeddings = False
    c.model.logit_soft_cap = 0.0  # >= 0; 0 is off
    c.model.compute_dtype = "auto"  # auto | float32 | bfloat16; auto is float32 on a CPU, bfloat16 elsewhere
    # kernel of attention in training steps and prefill: auto | xla | mosaic, triton, cudnn (GPUs; cudnn in bfloat16) |
    # xla_chunked (these from tokamax, requirements-extra.txt) | splash (TPUs, mesh.trainer.context 1); auto is what was
    # measured to be quickest, else xla
    c.model.attention = "auto"
    # and in decoding: auto | xla | triton (GPUs) | mosaic (TPUs, the paged cache); head_dim a power of two
    c.model.decode_attention = "auto"
    c.model.lora = ml_collections.ConfigDict()  # adapters of low rank; they alone are trained and sent to samplers
    c.model.lora.rank = 0  # >= 0; 0 is off: all parameters are trained
    c.model.lora.alpha = 32.0  # > 0; the adapters' part is multiplied by alpha / rank
    # what has one in every layer, by the names that PEFT uses
    c.model.lora.target_modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    c.data = ml_collections.ConfigDict()
    c.data.name = "arithmetic"  # arithmetic | two_digit_addition | jsonl | tfds/NAME | reasoning_gym/TASK
    c.data.path = ""  # jsonl: the training file, .jsonl or .jsonl.gz
    c.data.heldout_path = ""  # jsonl: the test file; '' holds out test_fraction of the questions, by hash
    c.data.test_fraction = 0.1  # jsonl without heldout_path: share of the questions held out for tests, in [0, 1)
    c.data.validation_fraction = 0.05  # jsonl: share of the questions in the validation split, in [0, 1)
    c.data.question_key = "question"  # jsonl, tfds: where a record has the question
    c.data.answer_key = "answer"  # jsonl, tfds: and the answer, alone, after '####' or in the last \boxed{}
    c.data.train_split = "train"  # tfds: name of the split, slices such as train[:90%] included
    c.data.validation_split = "validation"  # tfds
    c.data.test_split = "test"  # tfds
    c.data.template = "plain"  # plain | few_shot | chat (the tokenizer's chat template)
    c.data.system_prompt = ""  # chat: the system message; otherwise text before everything else
    c.data.question_format = "{question}"  # text of one problem
    c.data.shots = 0  # few_shot, chat: solved examples, the first ones of the training split, >= 0
    c.data.shot_format = " {answer}\n\n"  # text after an example's question: {answer}, {solution}
    c.data.overlong = "refuse"  # refuse | skip: prompts of more than rollout.max_prompt_length tokens
    # for generated data and warm starts; '' is ~/.cache/areal_jax. All processes of a trainer must see it
    c.data.cache_dir = ""
    c.data.heldout_problems = 600  # problems that evaluations use, >= 1

    c.warm_start = ml_collections.ConfigDict()  # the supervised stages before RL
    c.warm_start.enabled = True
    c.warm_start.seed = -1  # int >= 0: its initialisation and data order; -1 takes config.seed
    c.warm_start.use_cache = True  # take and keep the result by the hash of all that determines it
    c.warm_start.rows = 16  # packed rows of trainer.row_length per update, >= 1
    c.warm_start.skill_accuracy = 0.85  # stop the skill stage at this sampled accuracy on validation, in (0, 1]
    c.warm_start.skill_updates = 800  # or after this many updates, >= 0
    c.warm_start.skill_learning_rate = 2e-3  # > 0
    c.warm_start.check_every = 25  # updates between two measurements on validation, >= 1
    c.warm_start.validation_problems = 400  # >= 1
    c.warm_start.habit_updates = 80  # of the habit stage (mostly direct answers), >= 0; 0 leaves the skill in the open
    c.warm_start.habit_direct_fraction = 0.8  # of its examples, in [0, 1]
    c.warm_start.habit_learning_rate = 1e-3  # at its start, > 0
    c.warm_start.habit_learning_rate_final = 1e-4  # at its end, > 0

    c.rollout = ml_collections.ConfigDict()
    c.rollout.max_staleness = 4.0  # policy versions, >= 0; 0 is synchronous RL, inf unbounded (AReaL's eta)
    c.rollout.injected_staleness = 0  # experiment, with max_staleness 0: weights of samplers so many versions old, >= 0
    c.rollout.over_stale = "train"  # train | drop | mask_tokens: tokens over the bound when they are consumed
    c.rollout.zero_variance_groups = (
        "keep"  # keep | drop (out of the loss) | refill (draw others): all rewards the same
    )
    c.rollout.max_refills = 8  # refill: batches of such groups passed over for one batch before they are taken, >= 1
    c.rollout.group_size = 8  # samples per prompt, >= 1
    c.rollout.temperature = 1.0  # of training samples, > 0
    # which tokens may be drawn, unless greedily; behaviour log-probs are of the distribution over those, the trainer's
    # own are of the whole one
    c.rollout.top_k = 0  # the so many likeliest, >= 0; 0 is all
    c.rollout.top_p = 1.0  # the fewest whose probabilities sum to at least this, in (0, 1]; 1 is all
    c.rollout.min_p = 0.0  # those with this share of the likeliest one's probability, in [0, 1); 0 is all
    c.rollout.max_prompt_length = 16  # tokens, >= 1
    c.rollout.max_response_length = 72  # tokens, the end of sequence included, >= 1
    c.rollout.slots = 64  # sequences decoded at once per sampler, >= 1
    # keys and values: dense has a row of prompt + response for each slot; paged has blocks from a common pool of
    # cache_tokens, so that memory follows the tokens alive: samples wait for blocks, or are computed again
    c.rollout.cache = "dense"  # dense | paged
    c.rollout.cache_tokens = 0  # paged: tokens of the pool, >= prompt + response + a block; 0 is 0.4 of dense
    c.rollout.block_size = 128  # paged: tokens of a block, >= 1; a power of two, at most 1/8 of a sequence, is taken
    c.rollout.prefill_tokens = 16384  # most tokens prefilled between two chunks; longer prompts go in pieces, >= 1
    c.rollout.batching = "continuous"  # continuous | static (the baseline: all rows are computed until all are done)
    c.rollout.chunk = 16  # most decode steps between two visits of the host, >= 1
    c.rollout.compaction = True  # decode a half or a quarter of the slots where no more are alive and nothing waits
    c.rollout.stop_strings = ()  # text that ends a response; the tokens up to and including the match are kept
    # when the weights change: recompute | keep the live samples' keys and values, or finish all samples before it
    c.rollout.kv_on_update = "recompute"
    c.rollout.environment = "single_turn"  # a name in areal_jax.environments.single_turn.ENVIRONMENTS
    c.rollout.queue_capacity = 2048  # samples in complete groups; >= one batch. When full, samplers wait
    c.rollout.lease_timeout_seconds = 60.0  # silence after which a sampler's samples are issued again, > 0

    c.reward = ml_collections.ConfigDict()
    c.reward.name = "exact_answer"  # a name in areal_jax.rewards.math.REWARDS: exact_answer | math | text
    c.reward.correct = 1.0  # the reward of a right answer, > 0
    c.reward.incorrect = 0.0  # and of a wrong one, <= 0
    c.reward.grade_truncated = False  # whether a response cut at max_response_length may be right
    c.reward.workers = 2  # symbolic comparisons at once in each sampler, >= 1
    c.reward.timeout_seconds = 2.0  # after which such a grade is killed and counts as wrong, > 0
    c.reward.memory_mb = 1024  # of one such process, >= 64
    # shaping: clip((R + overlong penalty + bias) * scale, -clip, clip)
    c.reward.bias = 0.0
    c.reward.scale = 1.0  # not 0
    c.reward.clip = 20.0  # > 0
    c.reward.overlong_buffer = 0  # tokens before max_response_length over which a penalty grows; 0 is off
    c.reward.overlong_factor = 1.0  # the penalty at max_response_length, > 0
    c.reward.truncated = "keep"  # keep | zero_reward | mask (out of the loss): responses cut at max_response_length
    c.reward.kl_coefficient = 0.0  # >= 0; takes coefficient * (log-prob - that of the initial policy) off at each token
    c.reward.shuffle = False  # control experiment: permute the rewards of each batch, so that they carry no signal

    c.advantage = ml_collections.ConfigDict()
    c.advantage.name = "group_norm"  # group_norm | dr_grpo | rloo | batch_norm | reinforce_pp | gae
    c.advantage.gamma = 1.0  # gae, reinforce_pp: discount per token, in (0, 1]
    c.advantage.lam = 1.0  # gae: lambda, in [0, 1]
    c.advantage.group_baseline = False  # reinforce_pp: take the group's mean reward off first
    c.advantage.whiten = False  # normalise the advantages over the tokens of the batch afterwards

    c.critic = ml_collections.ConfigDict()  # needed by gae and by nothing else
    c.critic.kind = "none"  # none | head (on the policy) | network (layers of its own, which start as the policy's)
    c.critic.learning_rate = 1e-4  # > 0, constant
    c.critic.coefficient = 0.5  # of the value loss in the policy's layers, for `head`, >= 0
    c.critic.clip = 0.5  # most that a value may change in a training step before its loss is clipped; 0 is off

    c.loss = ml_collections.ConfigDict()
    c.loss.name = (
        "decoupled_ppo"  # ppo | decoupled_ppo | staleness_ppo | gspo | cispo | sapo | m2po | topr | dppo | reinforce
    )
    c.loss.aggregation = "token_mean"  # token_mean | seq_mean_token_mean | seq_mean_token_sum | constant (Dr. GRPO)
    c.loss.clip_low = 0.2  # ppo, decoupled_ppo, staleness_ppo: in (0, 1)
    c.loss.clip_high = 0.2  # and > 0
    c.loss.dual_clip = 0.0  # where A < 0 the loss is at most this times -A; > 1, usually 3; 0 is off
    # the proximal policy, for decoupled objectives and importance weights: recompute it by a forward before the step,
    # interpolate it (loglinear), or take the behaviour's; auto is recompute
    c.loss.proximal = "auto"  # auto | recompute | loglinear | behaviour
    c.loss.proximal_check = False  # with loglinear: recompute it as well and report the difference
    # w = exp(proximal - behaviour) multiplies decoupled objectives and reinforce: auto is clamp for the decoupled ones
    # and none for the others
    c.loss.importance_weight = "auto"  # auto | clamp | mask (0 outside importance_low to importance_cap) | none
    c.loss.importance_level = "token"  # token | sequence (the geometric mean over its tokens)
    c.loss.importance_cap = 5.0  # > 0
    c.loss.importance_low = 0.5  # mask: in [0, 1)
    c.loss.opsm_threshold = 0.0  # reject sequences with A < 0 and mean(behaviour - policy log-prob) over it; 0 is off
    c.loss.staleness_base = "decoupled_ppo"  # ppo | decoupled_ppo: what staleness_ppo narrows the clip range of
    c.loss.staleness_scope = "token"  # token | sequence | batch: whose (mean) staleness narrows it
    c.loss.staleness_decay = 0.95  # per version, in (0, 1]
    c.loss.staleness_floor = 0.1  # in (0, 1]
    c.loss.gspo_clip_low = 3e-4  # in (0, 1)
    c.loss.gspo_clip_high = 4e-4  # > 0
    c.loss.cispo_low = 0.0  # bounds of the weight: in [0, 1)
    c.loss.cispo_high = 5.0  # > 1
    c.loss.sapo_positive = 1.0  # temperature where A > 0, > 0
    c.loss.sapo_negative = 1.05  # and where A <= 0, > 0
    c.loss.m2po_threshold = 0.04  # most that the mean squared log-ratio may be, > 0
    c.loss.dppo_threshold = 0.2  # change of a token's probability, in (0, 1)
    c.loss.dppo_penalty = 1e-3  # of the squared log-ratio, >= 0
    c.loss.kl_coefficient = 0.0  # >= 0; penalises KL(policy || initial policy)
    c.loss.kl_estimator = "k3"  # k2 | k3 (the value of k3 with the gradient of k2)
    c.loss.entropy_coefficient = 0.0  # >= 0

    c.trainer = ml_collections.ConfigDict()
    c.trainer.steps = 60  # training steps = policy versions, >= 1
    c.trainer.batch_prompts = 32  # prompts per training step; times rollout.group_size samples
    c.trainer.minibatches = 2  # optimiser updates per training step; divides the samples
    c.trainer.row_length = 128  # tokens of a packed row, >= prompt + response
    c.trainer.micro_batch_rows = 4  # rows that a device has at once in a training step, >= 1
    # rows of a micro-batch of short sequences are cut into 2, 4, ... 2^row_halvings parts, which attention is faster
    # on; the step is compiled for each number of them
    c.trainer.row_halvings = 0  # >= 0; 2^row_halvings divides row_length
    c.trainer.logprob_chunk = 0  # tokens whose logits a device has at once; 0: 1/8 of a micro-batch, 128 to 4096
    c.trainer.diagnostics = True  # measure clipping, ratios, divergences, all by staleness; False saves a little time
    c.trainer.remat = "none"  # none | dots | full: layer results that the backward computes again, to save memory
    # a loop over the layers instead of one after another: compiles faster, and remat saves memory on a CPU only so; a
    # copy of the layers' parameters more, and slower on small models
    c.trainer.scan_layers = False

    c.optimizer = ml_collections.ConfigDict()
    c.optimizer.learning_rate = 1e-4  # > 0
    c.optimizer.schedule = "cosine"  # cosine (half a period) | linear | constant, after the warm-up
    c.optimizer.final_learning_rate = 1e-4  # of cosine and linear, at the last step, >= 0
    c.optimizer.warmup_steps = 0  # steps of linear warm-up, >= 0
    c.optimizer.b1 = 0.9  # in [0, 1)
    c.optimizer.b2 = 0.99  # in [0, 1)
    c.optimizer.eps = 1e-8  # > 0
    c.optimizer.weight_decay = 0.0  # >= 0, on matrices but those of the vocabulary
    c.optimizer.vocabulary_weight_decay = 0.0  # >= 0, on the embedding and the output matrix
    c.optimizer.first_moment_dtype = "float32"  # float32 | bfloat16
    c.optimizer.offload = False  # keep the optimizer's state in the host's memory between steps
    c.optimizer.max_skipped = 3  # updates in a row that are left out for a gradient that is not finite; >= 0
    c.optimizer.max_grad_norm = 1.0  # global norm, > 0
    c.optimizer.scale_by_ess = False  # times sqrt(effective sample size / samples) of the sequences' ratios

    # sizes of the mesh axes; one may be -1: the rest of the devices. data and fsdp split the rows of a batch, fsdp the
    # parameters too, tensor heads and features, context (the trainer's) the tokens of a row
    c.mesh = ml_collections.ConfigDict()
    c.mesh.trainer = ml_collections.ConfigDict({"data": -1, "fsdp": 1, "tensor": 1, "context": 1})
    c.mesh.sampler = ml_collections.ConfigDict({"data": -1, "fsdp": 1, "tensor": 1})

    c.evaluation = ml_collections.ConfigDict()
    c.evaluation.every_steps = 5  # training steps between evaluations, >= 0; 0: only before and after
    c.evaluation.split = "test"  # test | validation: choose settings on validation, report test
    c.evaluation.temperature = 1.0  # of the sampled accuracy, > 0; greedy accuracy is always measured too

    c.checkpoint = ml_collections.ConfigDict()
    c.checkpoint.every_steps = 20  # >= 0; 0: only at the end

    c.transport = ml_collections.ConfigDict()
    c.transport.host = "127.0.0.1"  # interface that the trainer listens on
    c.transport.port = 0  # 0 to 65535; 0 takes a free one
    c.transport.address = ""  # samplers: tcp://host:port of the trainer; '' reads it from <workdir>/endpoint.json
    c.transport.max_message_bytes = 64 << 20  # of one report or reply, >= 1024

    c.launch = ml_collections.ConfigDict()
    c.launch.kind = "auto"  # auto | colocated | local
    c.launch.samplers = 1  # sampler processes of `local`, >= 1
    c.launch.trainer_devices = ""  # accelerators of the trainer, e.g. '0,1'; '' is half of them
    c.launch.sampler_devices = ""  # accelerators of the samplers, shared out evenly; '' is the others
    c.launch.pin_cores = True  # on a CPU: give each sampler a core of its own
    c.launch.max_restarts = 3  # of one sampler killed by a signal, >= 0
    return c
