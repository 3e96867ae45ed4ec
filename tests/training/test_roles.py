"""Models beside the policy: padded vocabularies, what is refused before anything trains, and what a
teacher can read."""

import asyncio
from dataclasses import replace

import pytest
import torch

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.scoring import fill_columns
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.resolve import build, resolve
from ratchet.config.schema import OptimizerConfig
from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.data.packing import pack
from ratchet.errors import ConfigError, DataError
from ratchet.learners.config import DTensorConfig, LocalConfig, MegatronConfig
from ratchet.learners.optim.config import MuonConfig
from ratchet.models.decoder import Decoder
from ratchet.models.policy import DecoderPolicy
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.training.roles import WHOLE_VOCABULARY, check_roles, get_max_row_length, make_roles

TOKENIZER = character_tokenizer("0123456789=")
V = TOKENIZER.vocab_size  # 24
ROWS = [([10, 11], [12, 13, 14]), ([9], [15, 1]), ([10, 12], [])]


def model(vocab_size=V, seed=0, **shape):
    config = DecoderConfig(vocab_size, 8, 1, 2, 1, 4, 12, init_std=0.6, **shape)
    return DecoderPolicy(Decoder(config).init_weights(seed).double())


@pytest.fixture
def saved(tmp_path):
    def save(net, tokenizer=TOKENIZER):
        directory = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        net.save(directory)
        tokenizer.save(directory)
        return str(directory)

    return save


def algorithm(kind, **keys):
    return build(resolve("algorithm", {"kind": kind, **keys}))


def roles_of(net, algo):
    return make_roles(
        net, TOKENIZER, algo, section=LocalConfig(), optimizer=OptimizerConfig(lr=0.01), steps=1
    )


def test_a_learner_of_several_processes_without_any_is_refused():
    with pytest.raises(ConfigError, match=r"there are none. Pass the ranks"):
        make_roles(
            model(),
            TOKENIZER,
            algorithm("sft"),
            section=DTensorConfig(),
            optimizer=OptimizerConfig(),
            steps=1,
        )


def test_another_optimizer_is_refused_where_the_learner_has_its_own():
    algo, spec = algorithm("sft"), resolve("algorithm", {"kind": "sft"})
    options = {
        "section": MegatronConfig(),
        "optimizer": MuonConfig(),
        "ranks": object(),
        "algorithm_section": spec,
    }
    with pytest.raises(
        ConfigError, match=r"has only its own AdamW, and MuonConfig.*Set optimizer.kind=adamw"
    ):
        make_roles(model(), TOKENIZER, algo, steps=1, **options)


def batch(rows=ROWS):
    return pack(
        [
            make_group(f"g{i}", [make_trajectory(*row, temperature=1.0 - 0.2 * i)])
            for i, row in enumerate(rows)
        ]
    )


def log_p(net, made, count):
    """[T, count]: renormalised over the first tokens, of what each place was predicted to be."""
    hidden = net.hidden(made.tokens_T, made.positions_T, made.lengths_S.tolist())
    temperature_T = made.temperature_S[made.sequence_T][:, None]
    return (net.logits(hidden).roll(1, 0) / temperature_T)[:, :count].log_softmax(-1)


@pytest.mark.parametrize(
    ("mine", "theirs", "top_k", "kind"),
    [
        (*sizes, top_k, ("distill_off_policy", "distill_on_policy")[(i + j) % 2])
        for i, sizes in enumerate(
            [(V + 8, V + 16), (V + 16, V + 8), (V, V + 8), (V + 8, V), (V + 8, V + 8)]
        )
        for j, top_k in enumerate([None, 3, 64])
    ],
)
def test_embeddings_of_different_sizes_are_compared_over_the_tokens_of_both(
    mine, theirs, top_k, kind, saved
):
    """Value and gradient, by the models' own softmax over the first min(mine, theirs) tokens."""
    path, made = saved(model(theirs, seed=5).float()), batch()
    algo = algorithm(kind, teacher=path, top_k=top_k, objective="forward")
    student, count = model(mine, seed=1), min(mine, theirs)
    roles = roles_of(student, algo)
    weighed = algo.weigh(asyncio.run(fill_columns(made, algo, roles)), AlgoState())
    if weighed.has("teacher_ids"):
        assert weighed.need("teacher_ids").max() < count
    sums = roles["policy"]._accumulate(weighed, algo.losses["policy"])
    own, teacher = model(mine, seed=1), roles["teacher"].inner.model.double()
    log_q, log_t = log_p(own, made, count), log_p(teacher, made, count).detach()
    if top_k == 3:
        ids = log_t.topk(3).indices
        with_rest = [
            torch.cat(
                [x.gather(1, ids), x.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)], 1
            )
            for x in (log_q, log_t)
        ]
        log_q, log_t = with_rest
    expected = (log_t.exp() * (log_t - log_q)).sum(-1)[made.trainable_T].mean()
    expected.backward()
    assert sums["loss"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert expected.item() > 0.01
    for found, wanted in zip(student.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("mine", "theirs"), [(V + 16, V + 8), (V + 8, V + 16)])
def test_a_sampled_row_of_padding_breaks_nothing(mine, theirs, saved):
    """It means nothing to either model, and neither does the teacher's last row."""
    algo = algorithm("on_policy_distillation", teacher=saved(model(theirs, seed=5)))
    roles = roles_of(model(mine), algo)
    made = asyncio.run(fill_columns(batch([([10], [11, mine - 1, 12])]), algo, roles))
    assert made.need("teacher_logprobs").isfinite().all()
    assert made.tokens_T.max() == mine - 1


def test_a_teacher_of_several_tags_is_loaded_once(saved, monkeypatch):
    from ratchet.training import roles

    loaded, plain = [], roles.load_policy
    monkeypatch.setattr(
        roles, "load_policy", lambda path, **options: loaded.append(path) or plain(path, **options)
    )
    path = saved(model(seed=5))
    made = roles_of(model(), algorithm("distill_on_policy", teacher={"a": path, "b": path}))
    assert loaded == [path]
    assert set(made) == {"policy", "teacher/a"}


# --- what is refused before anything trains


def refused(algo, message, net=None, error=ConfigError, **options):
    with pytest.raises(error, match=message):
        check_roles((net or model()).vocab_size, TOKENIZER, algo, **options)


def test_a_teacher_that_is_not_there_is_refused(tmp_path):
    algo = algorithm("distill_on_policy", teacher={"": str(tmp_path), "b": str(tmp_path / "none")})
    refused(algo, "teacher: .* is not a model directory: it has no config.json")
    algo = algorithm("on_policy_distillation", teacher={"b": str(tmp_path / "none")})
    refused(
        algo,
        "teacher/b: there is no model directory .*none': .* If another run makes this model",
    )


def test_a_teacher_that_reads_less_than_an_attempt_is_refused(saved):
    path = saved(model(max_positions=32))
    for kind in ("distill_on_policy", "on_policy_distillation"):
        algo = algorithm(kind, teacher=path)
        check_roles(V, TOKENIZER, algo, longest=32)
        refused(
            algo,
            "reads 32 tokens, but attempts may have 33. Lower sampling.max_new_tokens",
            longest=33,
        )


def test_a_teacher_of_other_tokens_is_refused(saved):
    other = saved(model(), character_tokenizer("=9876543210"))
    refused(algorithm("distill_on_policy", teacher=other), "another tokenizer than the policy")
    check_roles(
        V,
        TOKENIZER,
        algorithm("on_policy_distillation", teacher=other, teacher_tokens="aligned"),
    )


def test_a_teacher_whose_embedding_lacks_tokens_is_refused(saved):
    refused(
        algorithm("distill_on_policy", teacher=saved(model(V - 4))),
        f"has {V} tokens, but the model's embedding has {V - 4}",
    )


def test_a_large_vocabulary_is_not_compared_whole(saved):
    large = model(WHOLE_VOCABULARY + 1)
    path = saved(large)
    whole = algorithm("distill_on_policy", teacher=path, top_k=None)
    refused(
        whole,
        r"top_k=null keeps 4,097 log-probabilities for each token of a batch.*Set algorithm.top_k",
        net=large,
    )
    check_roles(V, TOKENIZER, whole)  # they have few tokens in common
    check_roles(large.vocab_size, TOKENIZER, algorithm("distill_on_policy", teacher=path))


# --- what a teacher can read


def test_attempts_end_where_a_teacher_stops_reading(saved):
    algo = algorithm("distill_on_policy", teacher=saved(model(max_positions=32)))
    net = model(max_positions=64)
    assert get_max_row_length(net, roles_of(net, algo)) == 32
    other = saved(model(max_positions=32), character_tokenizer("=9876543210"))
    aligned = algorithm("on_policy_distillation", teacher=other, teacher_tokens="aligned")
    assert get_max_row_length(net, roles_of(net, aligned)) == 64
    assert get_max_row_length(net, roles_of(net, algorithm("grpo", kl={"coef": 0.1}))) == 64


def test_given_text_that_a_teacher_cannot_read_is_refused(saved):
    algo = algorithm("distill_off_policy", teacher=saved(model(max_positions=4)))
    roles = roles_of(model(), algo)
    asyncio.run(fill_columns(batch([([10, 11], [12, 13])]), algo, roles))
    with pytest.raises(
        DataError,
        match=r"teacher reads at most 4 tokens, but a row has 5\. Shorten or drop the row",
    ):
        asyncio.run(fill_columns(batch([([10, 11], [12, 13, 14])]), algo, roles))


def test_an_aligned_teacher_leaves_out_what_lies_beyond_its_context(saved):
    other = saved(model(max_positions=4), character_tokenizer("=9876543210"))
    algo = algorithm("on_policy_distillation", teacher=other, teacher_tokens="aligned")
    made = asyncio.run(
        fill_columns(batch([([10, 11], [12, 13, 14])]), algo, roles_of(model(), algo))
    )
    assert made.need("teacher_spans").tolist() == [-1, -1, 0, 1, -1]
    assert (made.need("teacher_logprobs") < 0).tolist() == [False, False, True, True, False]
    advantages = algo.advantage(made, AlgoState())
    assert advantages.metrics["teacher/uncovered_share"] == pytest.approx(1 / 3)


# --- memory


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most numbers that any tensor made within had."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(
                    self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size()
                )
        return out


def test_a_teacher_holds_a_chunk_of_the_distributions_at_a_time(saved):
    """4 rows of 256 tokens in two micro-batches, of a vocabulary of 2,000: never [T, V], which is 2
    million numbers."""
    net = model(2000).float()
    algo = algorithm("distill_off_policy", teacher=saved(net), top_k=8)
    section = LocalConfig(micro_batch_tokens=512, logprob_chunk_mib=1)
    roles = make_roles(net, TOKENIZER, algo, section=section, optimizer=OptimizerConfig(), steps=1)
    made = batch([([10], [11] * 255)] * 4)
    with Largest() as largest:
        filled = asyncio.run(fill_columns(made, algo, roles))
    assert filled.need("teacher_topk_logprobs").shape == (1024, 9)
    assert largest.numbers <= 2**20 // 4
    whole = replace(
        algo,
        passes=tuple(
            replace(item, top_k=0) for item in algo.passes if item.output == "topk_logprobs"
        ),
    )
    with Largest() as largest:
        filled = asyncio.run(fill_columns(made, whole, roles))
    assert not filled.has("teacher_ids")
    assert largest.numbers == 1024 * 2000  # asked for
