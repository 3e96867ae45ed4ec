"""The suites of upstream's tests, and those that do not pass, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

UNIT = "tests/unit"


@dataclass(frozen=True, eq=False)
class Suite:
    """A file of tests.

    Attributes:
        title: The library's name.
        peer: The library's key among the checkouts.
        path: The file in the repository.
        only: Beginnings of the tests' names that count; (): all.
        other: Reasons why tests are not applicable, by a part of their names.
    """

    title: str
    peer: str
    path: str
    only: tuple[str, ...] = ()
    other: Mapping[str, str] = field(default_factory=dict)

    def covers(self, test: str) -> bool:
        return not self.only or test.startswith(self.only)


SUITES = (
    Suite("NeMo RL", "nemo-rl", f"{UNIT}/algorithms/test_loss_functions.py"),
    Suite("NeMo RL", "nemo-rl", f"{UNIT}/algorithms/test_advantage_estimator.py"),
    Suite(
        "NeMo RL",
        "nemo-rl",
        f"{UNIT}/algorithms/test_grpo.py",
        only=(
            *("test_grpo_advantage", "test_gdpo_advantage", "test_reinforce_plus_plus"),
            "test_calculate_rewards",
        ),
    ),
    Suite(
        "NeMo RL",
        "nemo-rl",
        f"{UNIT}/algorithms/test_ppo.py",
        only=("test_gae_", "test_raw_reward", "test_mse_value_loss"),
    ),
    Suite("NeMo RL", "nemo-rl", f"{UNIT}/distributed/test_batched_data_dict.py"),
    Suite("NeMo RL", "nemo-rl", f"{UNIT}/data/test_multimodal_dict.py"),
    Suite("NeMo RL", "nemo-rl", f"{UNIT}/experience/test_rollouts.py"),
    Suite("verl", "verl", "tests/trainer/ppo/test_core_algos_on_cpu.py"),
    Suite("ROLL", "roll", "tests/utils/test_compute_advantage.py"),
    Suite("ROLL", "roll", "tests/agentic/test_segment_masked_mean.py"),
    Suite("ROLL", "roll", "tests/utils/test_functionals.py"),
)
CLAMPS = ("not here", "clamps of the KL's log-ratio and of its value; kl has none")
METRICS = ("not here", "a metric of upstream's name, whose quantity is not reported")
AGGREGATION = ("not here", "how upstream's trainer normalises each metric over ranks")
WEIGHTED_KL = (
    "differs",
    "the penalty is weighted by the ratio to the old policy, so that its gradient is that of the KL "
    "(docs/algorithms); upstream weights by the ratio to the sampler, or not at all",
)
CUDA_DRAWS = ("not here", "compares with numbers that CUDA's random generator draws")
ONE_LOSS = ("not here", "combinations of loss flags; a recipe names one loss")
WHITENING = (
    "differs",
    "advantages are divided by the standard deviation with ddof 0, and a lone token gets 0",
)
PRIVATE = ("not here", "private attributes of upstream's PackedTensor")
MEDIA_COLUMNS = (
    "not here",
    "media for the generator in columns and PackedTensors; here they are in the logs' content",
)
# By test: ("differs" or "not here", the reason).
FAILURES: Mapping[str, tuple[str, str]] = {
    "test_calculate_kl": CLAMPS,
    "test_calculate_kl_detaches_importance_sampling_when_input_clamped": CLAMPS,
    "test_calculate_kl_output_clamp_includes_importance_sampling_weight": CLAMPS,
    "test_clipped_pg_loss_kl_penalty": WEIGHTED_KL,
    "test_clipped_pg_loss_kl_gradient_includes_sampling_term": WEIGHTED_KL,
    "test_clipped_pg_loss_force_on_policy_ratio": METRICS,
    "test_clipped_pg_loss_entropy": METRICS,
    "test_opd_metrics_returned": METRICS,
    "test_mse_value_loss_metrics": METRICS,
    "test_clipped_pg_loss_cispo_incompatibility_asserts": ONE_LOSS,
    "test_distillation_loss_different_settings": CUDA_DRAWS,
    "TestMetricNormalizationAdvertisement::test_default_grpo_config": AGGREGATION,
    "TestMetricNormalizationAdvertisement::test_gspo_config_keys_on_sequence_flags": AGGREGATION,
    "TestMetricNormalizationAdvertisement::test_seq_mask_tis_with_token_level_loss": AGGREGATION,
    "TestMetricNormalizationAdvertisement::test_tis_under_sequence_level_loss_stays_tokens": (
        AGGREGATION
    ),
    "TestMetricNormalizationAdvertisement::test_nll_loss_advertises_counts_as_none": AGGREGATION,
    "test_split_rescale_matches_sync_normalization": AGGREGATION,
    "test_gae_length_adaptive_lambda": ("not here", "a private method of upstream's class"),
    "test_raw_reward_basic_broadcast_and_masking": (
        "differs",
        "tokens that do not train have the advantage 0, not the reward",
    ),
    "test_from_batches_flag_off_keeps_legacy_first_field_batch_size": (
        "differs",
        "a batch with a column that has no length is refused before missing columns are looked for",
    ),
    "test_from_batches_optional_media_rejects_cross_key_row_misalignment": (
        "differs",
        "the same batch is refused with a ValueError, which has another text",
    ),
    "test_repeat_interleave_rejects_top_level_packed_tensor": (
        "differs",
        "rows of a PackedTensor are repeated, and share their segments; upstream refuses",
    ),
    "test_get_multimodal_dict_casts_only_pixels_without_materializing_dedup": PRIVATE,
    "test_packedtensor_to_dtype_returns_independent_wrapper_when_dtype_matches": PRIVATE,
    "test_packedtensor_unpickles_pre_deduplication_state": (
        "not here",
        "reads what upstream's class had pickled before it had deduplication",
    ),
    "test_dynamic_resolution_padding_is_cropped_before_radio_patchification": (
        "not here",
        "a model of Megatron Bridge, which is not installed",
    ),
    "test_sync_vlm_multiturn_drops_stale_native_content": MEDIA_COLUMNS,
    "test_async_vlm_generation_receives_exact_compact_native_media_payload": MEDIA_COLUMNS,
    "test_async_vlm_generation_uses_policy_media_without_native_payload": MEDIA_COLUMNS,
    "test_async_vlm_multiturn_drops_stale_native_content": MEDIA_COLUMNS,
    "test_sequence_packing_executes_bins_largest_first": (
        "differs",
        "rows are packed first-fit decreasing, not by upstream's modified form of it",
    ),
    "test_sequence_packing_with_dynamic_batching_conflict": (
        "differs",
        "the same arguments are refused, with DataError in place of AssertionError",
    ),
    "test_shard_by_batch_size_validation": (
        "differs",
        "the same batches are refused, with DataError in place of AssertionError",
    ),
    "test_generate_responses_async_requires_sglang_opt_in": (
        "not here",
        "a flag of upstream's SGLang backend",
    ),
    "test_native_rollout_groups_match_whole_batch": (
        "not here",
        "a rollout function for groups of rows, run_async_multi_turn_rollout_groups",
    ),
    "test_compute_advantage_handles_short_response_masks[response_mask1": WHITENING,
    "test_compute_advantage_handles_short_response_masks[response_mask2": WHITENING,
    "test_gdpo_advantage_estimator_single_reward": (
        "differs",
        "one named part is accepted: its advantages are GRPO's",
    ),
}
