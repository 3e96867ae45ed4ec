"""The built-in kinds of each slot of a recipe: short names and their config classes.

Classes are given as import paths, so that only the kinds that a recipe names are imported.
"""

from __future__ import annotations

from collections.abc import Mapping

ESTIMATORS: Mapping[str, str] = {
    "group_relative": "ratchet.algorithms.config.advantages:GroupRelative",
    "rloo": "ratchet.algorithms.config.advantages:RLOO",
    "reinforce_pp": "ratchet.algorithms.config.advantages:ReinforcePP",
    "remax": "ratchet.algorithms.config.advantages:ReMax",
    "opo": "ratchet.algorithms.config.advantages:OPO",
    "gdpo": "ratchet.algorithms.config.advantages:GDPO",
    "gae": "ratchet.algorithms.config.advantages:GAE",
    "turn_returns": "ratchet.algorithms.config.advantages:TurnReturns",
    "gigpo": "ratchet.algorithms.config.advantages:GiGPO",
    "on_policy_distillation": "ratchet.algorithms.config.advantages:OnPolicyDistillation",
}
SINGLE_TURN_ENVIRONMENTS: Mapping[str, str] = {
    "arithmetic": "ratchet.environments.toy.arithmetic:ArithmeticConfig",
    "sorting": "ratchet.environments.toy.sorting:SortingConfig",
    "countdown": "ratchet.environments.toy.countdown:CountdownConfig",
    "gsm8k": "ratchet.environments.datasets.gsm8k:GSM8KConfig",
    "programs": "ratchet.environments.code.programs:ProgramsConfig",
    "dataset": "ratchet.environments.datasets.config:DatasetConfig",
}
ENVIRONMENTS: Mapping[str, str] = {
    **SINGLE_TURN_ENVIRONMENTS,
    "preferences": "ratchet.environments.datasets.config:PreferencesConfig",
    "terminal": "ratchet.environments.tool_use.terminal:TerminalConfig",
    "harbor": "ratchet.environments.harbor.environment:HarborConfig",
    "sliding_puzzle": "ratchet.environments.games.sliding_puzzle:SlidingPuzzleConfig",
    "frozen_lake": "ratchet.environments.games.frozen_lake:FrozenLakeConfig",
    "vlm": "ratchet.environments.datasets.vlm:VLMConfig",
    "shapes": "ratchet.environments.toy.drawn_shapes:ShapesConfig",
    "sokoban": "ratchet.environments.games.sokoban:SokobanConfig",
    "image_zoom": "ratchet.environments.toy.image_zoom:ImageZoomConfig",
    "number_guessing": "ratchet.environments.toy.number_guessing:NumberGuessingConfig",
    "shop": "ratchet.environments.shop.environment:ShopConfig",
    "gymnasium": "ratchet.environments.adapters.gymnasium:GymnasiumConfig",
    "gem": "ratchet.environments.adapters.gem:GemConfig",
    "textworld": "ratchet.environments.adapters.textworld:TextWorldConfig",
    "openenv": "ratchet.environments.openenv.environment:OpenEnvConfig",
    "nemo_gym": "ratchet.environments.servers.nemo_gym:NemoGymConfig",
    "open_reward": "ratchet.environments.servers.open_reward:OpenRewardConfig",
    "verifiers": "ratchet.environments.adapters.verifiers:VerifiersConfig",
    "message_log": "ratchet.experience.config:MessageLogConfig",
    "tool_use": "ratchet.environments.tool_use.environment:ToolUseConfig",
    "qa": "ratchet.environments.datasets.qa:QAConfig",
    "code_repair": "ratchet.environments.code.repair:CodeRepairConfig",
    "code_interpreter": "ratchet.environments.code.interpreter:CodeInterpreterConfig",
}
GENERATORS: Mapping[str, str] = {
    "engine": "ratchet.generators.config:EngineConfig",
    "hf": "ratchet.generators.config:HFConfig",
    "vllm": "ratchet.generators.config:VLLMConfig",
}
MIXTURE_PARTS: Mapping[str, str] = {
    **ENVIRONMENTS,
    "trl": "ratchet.environments.adapters.trl:TRLEnvironmentConfig",
    "workers": "ratchet.environments.workers.environment:WorkersConfig",
}
KINDS: Mapping[str, Mapping[str, str]] = {
    "algorithm": {
        "sft": "ratchet.algorithms.config.sft:SFTConfig",
        "policy_gradient": "ratchet.algorithms.config.policy_gradient:PolicyGradientConfig",
        "grpo": "ratchet.algorithms.config.named_policy_gradients:GRPOConfig",
        "dr_grpo": "ratchet.algorithms.config.named_policy_gradients:DrGRPOConfig",
        "dapo": "ratchet.algorithms.config.named_policy_gradients:DAPOConfig",
        "gspo": "ratchet.algorithms.config.named_policy_gradients:GSPOConfig",
        "cispo": "ratchet.algorithms.config.named_policy_gradients:CISPOConfig",
        "rloo": "ratchet.algorithms.config.named_policy_gradients:RLOOConfig",
        "reinforce_pp": "ratchet.algorithms.config.named_policy_gradients:ReinforcePPConfig",
        "remax": "ratchet.algorithms.config.named_policy_gradients:ReMaxConfig",
        "opo": "ratchet.algorithms.config.named_policy_gradients:OPOConfig",
        "gigpo": "ratchet.algorithms.config.named_policy_gradients:GiGPOConfig",
        "gdpo": "ratchet.algorithms.config.named_policy_gradients:GDPOConfig",
        "ppo": "ratchet.algorithms.config.named_policy_gradients:PPOConfig",
        "vapo": "ratchet.algorithms.config.named_policy_gradients:VAPOConfig",
        "topr": "ratchet.algorithms.config.named_policy_gradients:TOPRConfig",
        "gmpo": "ratchet.algorithms.config.named_policy_gradients:GMPOConfig",
        "sapo": "ratchet.algorithms.config.named_policy_gradients:SAPOConfig",
        "kimi": "ratchet.algorithms.config.named_policy_gradients:KimiConfig",
        "decoupled_ppo": "ratchet.algorithms.config.named_policy_gradients:DecoupledPPOConfig",
        # A policy gradient whose advantage is the teacher's logprob of each sampled token minus the
        # policy's. `distill_on_policy` minimizes a divergence of the two distributions instead.
        "on_policy_distillation": (
            "ratchet.algorithms.config.named_policy_gradients:OnPolicyDistillationConfig"
        ),
        "dpo": "ratchet.algorithms.config.preference:DPOConfig",
        "ipo": "ratchet.algorithms.config.preference:IPOConfig",
        "simpo": "ratchet.algorithms.config.preference:SimPOConfig",
        "orpo": "ratchet.algorithms.config.preference:ORPOConfig",
        "rpo": "ratchet.algorithms.config.preference:RPOConfig",
        "kto": "ratchet.algorithms.config.preference:KTOConfig",
        "reward_model": "ratchet.algorithms.config.reward_model:BradleyTerryConfig",
        "score_regression": "ratchet.algorithms.config.reward_model:ScoreRegressionConfig",
        "process_reward": "ratchet.algorithms.config.reward_model:ProcessRewardConfig",
        "distill_off_policy": "ratchet.algorithms.config.distillation:OffPolicyDistillationConfig",
        "distill_on_policy": "ratchet.algorithms.config.distillation:DivergenceOnPolicyConfig",
    },
    "advantage": {**ESTIMATORS, "mixture": "ratchet.algorithms.config.advantages:AdvantageMixture"},
    "estimator": ESTIMATORS,  # the parts of an advantage mixture
    "policy_loss": {
        "ppo": "ratchet.algorithms.config.policy_losses:PPO",
        "reinforce": "ratchet.algorithms.config.policy_losses:Reinforce",
        "gspo": "ratchet.algorithms.config.policy_losses:GSPO",
        "gspo_token": "ratchet.algorithms.config.policy_losses:GSPOToken",
        "cispo": "ratchet.algorithms.config.policy_losses:CISPO",
        "topr": "ratchet.algorithms.config.policy_losses:TOPR",
        "gmpo": "ratchet.algorithms.config.policy_losses:GMPO",
        "sapo": "ratchet.algorithms.config.policy_losses:SAPO",
        "kimi": "ratchet.algorithms.config.policy_losses:Kimi",
    },
    "shaping": {
        "overlong_penalty": "ratchet.algorithms.config.shaping:OverlongPenalty",
        "stop_properly": "ratchet.algorithms.config.shaping:StopProperly",
        "length_penalty": "ratchet.algorithms.config.shaping:LengthPenalty",
        "effort_length": "ratchet.algorithms.config.shaping:EffortLength",
        "scale": "ratchet.algorithms.config.shaping:ScaleRewards",
        "clip": "ratchet.algorithms.config.shaping:ClipRewards",
        "normalise": "ratchet.algorithms.config.shaping:NormaliseRewards",
        "component_weights": "ratchet.algorithms.config.shaping:ComponentWeights",
    },
    "environment": {
        **MIXTURE_PARTS,
        "mixture": "ratchet.environments.mixture:MixtureConfig",
        "atropos": "ratchet.experience.config:AtroposConfig",  # plays whole groups, so is no part
    },
    "part": MIXTURE_PARTS,  # the parts of an environment mixture
    "worker_environment": ENVIRONMENTS,  # the environments of environment workers
    "problems": SINGLE_TURN_ENVIRONMENTS,  # environments that another environment can wrap
    "tool": {
        "calculator": "ratchet.environments.tool_use.calculator:CalculatorConfig",
        "python": "ratchet.environments.tool_use.python:PythonConfig",
        "search": "ratchet.environments.tool_use.retriever:SearchConfig",
        "mcp": "ratchet.environments.tool_use.mcp:MCPConfig",
    },
    "sandbox": {
        "local": "ratchet.sandbox.config:LocalSandboxConfig",
        "docker": "ratchet.sandbox.config:DockerSandboxConfig",
        "remote": "ratchet.sandbox.config:RemoteSandboxConfig",
    },
    "rewards": {
        "exact_match": "ratchet.rewards.answers.exact_match:ExactMatchConfig",
        "bounding_box": "ratchet.rewards.answers.bounding_box:BoundingBoxConfig",
        "numeric_answer": "ratchet.rewards.answers.numeric:NumericAnswerConfig",
        "countdown": "ratchet.rewards.answers.countdown:CountdownRewardConfig",
        "math": "ratchet.rewards.answers.math:MathConfig",
        "boxed": "ratchet.rewards.answers.boxed:BoxedConfig",
        "multiple_choice": "ratchet.rewards.answers.multiple_choice:MultipleChoiceConfig",
        "crossthinkqa": "ratchet.rewards.integrations.roll_crossthinkqa:CrossThinkQAConfig",
        "detection": "ratchet.rewards.integrations.roll_detection:DetectionConfig",
        "video_r1": "ratchet.rewards.integrations.roll_video:VideoR1Config",
        "format": "ratchet.rewards.answers.format:FormatConfig",
        "regex": "ratchet.rewards.answers.regex:RegexConfig",
        "similarity": "ratchet.rewards.answers.similarity:SimilarityConfig",
        "length": "ratchet.rewards.answers.length:LengthConfig",
        "repetition": "ratchet.rewards.answers.repetition:RepetitionConfig",
        "unwanted_text": "ratchet.rewards.answers.unwanted_text:UnwantedTextConfig",
        "malformed_tool_calls": "ratchet.rewards.answers.malformed_calls:MalformedToolCallsConfig",
        "ifeval": "ratchet.rewards.answers.ifeval:IFEvalConfig",
        "code": "ratchet.rewards.code.reward:CodeConfig",
        "judge": "ratchet.rewards.llm.judge:JudgeConfig",
        "pairwise_judge": "ratchet.rewards.llm.judge:PairwiseJudgeConfig",
        "reward_model": "ratchet.rewards.reward_model:RewardModelConfig",
        "remote": "ratchet.rewards.remote:RemoteConfig",
        "by_tag": "ratchet.rewards.by_domain:ByTagConfig",
        "trl": "ratchet.rewards.integrations.trl:TRLRewardConfig",
        "verl": "ratchet.rewards.integrations.verl:VerlRewardConfig",
        "openrlhf": "ratchet.rewards.integrations.openrlhf:OpenRLHFRewardConfig",
    },
    "group_filter": {
        "reward_std": "ratchet.experience.async_rollouts.group_filter:RewardStdConfig"
    },
    "judge": {
        "language_model": "ratchet.rewards.judge_models.config:LanguageModelJudgeConfig",
        "reward_model": "ratchet.rewards.judge_models.config:RewardModelJudgeConfig",
    },
    "agent": {"command": "ratchet.experience.openai_proxy.config:CommandConfig"},
    "optimizer": {
        "adamw": "ratchet.config.schema:OptimizerConfig",
        "adamw8bit": "ratchet.learners.optim.config:AdamW8bitConfig",
        "muon": "ratchet.learners.optim.config:MuonConfig",
    },
    "learner": {
        "local": "ratchet.learners.config:LocalConfig",
        "dtensor": "ratchet.learners.config:DTensorConfig",
        "megatron": "ratchet.learners.config:MegatronConfig",
    },
    "generator": {
        **GENERATORS,
        "workers": "ratchet.generators.workers.config:GeneratorWorkersConfig",
    },
    "worker_generator": GENERATORS,  # the generators of generator workers
    "cluster": {
        "local": "ratchet.executors.config:LocalClusterConfig",
        "ray": "ratchet.executors.config:RayClusterConfig",
        "torchrun": "ratchet.executors.config:TorchrunClusterConfig",
    },
    "weight_sync": {
        "auto": "ratchet.weight_sync.config:AutoWeightSyncConfig",
        # Generator and learner use the same tensors, in one process. `shared_memory` copies the
        # weights to other processes of the host.
        "shared": "ratchet.weight_sync.config:SharedWeightSyncConfig",
        "shared_memory": "ratchet.weight_sync.config:SharedMemoryWeightSyncConfig",
        "collective": "ratchet.weight_sync.config:CollectiveWeightSyncConfig",
        "files": "ratchet.weight_sync.config:FilesWeightSyncConfig",
        "delta": "ratchet.weight_sync.config:DeltaWeightSyncConfig",
    },
    "sink": {
        "wandb": "ratchet.observe.config:WandbConfig",
        "mlflow": "ratchet.observe.config:MlflowConfig",
        "swanlab": "ratchet.observe.config:SwanlabConfig",
        "trackio": "ratchet.observe.config:TrackioConfig",
        "prometheus": "ratchet.observe.config:PrometheusConfig",
        "opentelemetry": "ratchet.observe.config:OpenTelemetryConfig",
    },
    "tokenizer": {
        "auto": "ratchet.data.tokenizer_config:AutoTokenizerConfig",
        "characters": "ratchet.data.tokenizer_config:CharactersConfig",
        "bytes": "ratchet.data.tokenizer_config:BytesConfig",
        "byte_bpe": "ratchet.data.tokenizer_config:ByteBPEConfig",
    },
}
DEFAULT_KIND: Mapping[str, str] = {
    "optimizer": "adamw",
    "learner": "local",
    "generator": "engine",
    "weight_sync": "auto",
    "tokenizer": "auto",
    "cluster": "local",
    "judge": "language_model",
}
_ENVIRONMENT_BASE = "ratchet.config.sections:EnvironmentConfig"
_ESTIMATOR_BASE = "ratchet.algorithms.config.advantages:Estimator"
# The base section of a slot, whose attributes every section of the slot has.
BASES: Mapping[str, str] = {
    "algorithm": "ratchet.config.sections:AlgorithmSection",
    **dict.fromkeys(("environment", "part", "worker_environment", "problems"), _ENVIRONMENT_BASE),
    "cluster": "ratchet.config.sections:ClusterSection",
    "judge": "ratchet.config.sections:JudgeSection",
    "learner": "ratchet.config.sections:LearnerSection",
    "generator": "ratchet.config.sections:GeneratorSection",
    "worker_generator": "ratchet.config.sections:GeneratorSection",
    "weight_sync": "ratchet.config.sections:WeightSyncSection",
    "advantage": _ESTIMATOR_BASE,
    "estimator": _ESTIMATOR_BASE,
    "policy_loss": "ratchet.algorithms.config.policy_losses:PolicyLoss",
    "shaping": "ratchet.algorithms.config.shaping:ShapingPart",
}
