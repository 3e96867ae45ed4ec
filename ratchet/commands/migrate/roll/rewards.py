"""Convert ROLL's reward workers to rewards, and its judges to models of the run.

"there" in a note means ROLL; "here" means Ratchet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.commands.migrate import numbers, shared
from ratchet.commands.migrate.numbers import InvalidValue
from ratchet.commands.migrate.roll.placement import make_vllm
from ratchet.commands.migrate.table import Dropped, Inert, PeerConfig, Values

JUDGE_WORKER = "LLMJudgeRewardWorker"
# The name of ROLL's only question to a judge: whether the answer matches the reference.
JUDGE_PROMPT = "Qwen2.5-7B-Instruct-RLVR-prompt"
RUBRIC = (
    "The final answer of the response must match the reference answer, in whatever language the "
    "two are written. An unclear or incomplete response does not match."
)
# The penalty of some workers for repeated n-grams, from -0.5 to 0, as a reward from 0 to 0.5.
REPETITION = {"kind": "repetition", "unit": "words", "ngram": 3, "weight": 0.5}
# ROLL's reward workers by class name, and the corresponding rewards of Ratchet.
REWARDS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "MathRuleRewardWorker": [{"kind": "math"}],
    # 20 s is the limit of ROLL's local tests.
    "CodeSandboxRewardWorker": [{"kind": "code", "timeout_s": 20, "language": "block"}],
    "MultipleChoiceBoxedRuleRewardWorker": [{"kind": "multiple_choice", "require_marker": True}],
    "GeneralRuleRewardWorker": [{"kind": "ifeval"}, REPETITION],
    "CrossThinkQARuleRewardWorker": [{"kind": "crossthinkqa"}, REPETITION],
}
CUT_NOTE = "a judge of the run draws from the whole distribution here, or greedily"
CREDITS = ("loose", "soft", "strict")


def convert_rewards(value: Any, config: PeerConfig) -> Any:
    """Convert the reward workers of all domains to one reward, or to rewards by a task's tag."""
    domains: dict[str, Any] = {}
    judges: list[dict[str, Any]] = []
    problems: dict[str, str] = {}
    converted_paths: set[str] = set()
    for domain, path in list_workers(config).items():
        try:
            domain_rewards, domain_judges = _convert_domain(domain, path, config)
        except InvalidValue as problem:
            problems[path] = str(problem)
            continue
        converted_paths.add(path)
        judges += domain_judges
        for tag in config[f"rewards.{domain}.tag_included"] or [domain]:
            domains[tag] = domain_rewards
    problem = problems.get(str(value))
    left_out = f"this reward and its rows are left out (environment.keep): {problem}"
    if problem is not None and str(value) not in converted_paths:
        return Dropped(left_out)
    has_judge = any(path.endswith(JUDGE_WORKER) for path in converted_paths)
    notes = ["the judge is asked in other words here"] if has_judge else []
    # Another domain has the same worker, and is converted.
    notes += [] if problem is None else [f"in one domain {left_out}"]
    judge_keys = {"judges": judges} if judges else {}
    first = next(iter(domains.values()))
    if all(domain_rewards == first for domain_rewards in domains.values()) and not problems:
        return Values({"rewards": first, **judge_keys}, "; ".join(notes))
    known_rows = [{"column": "tag", "one_of": list(domains)}]
    return Values(
        {
            "rewards": [{"kind": "by_tag", "domains": domains}],
            "environment.columns.tag": "tag",
            **judge_keys,
            **({"environment.keep": known_rows} if problems else {}),
        },
        "; ".join(["a task's tag selects its rewards", *notes]),
    )


def list_workers(config: PeerConfig) -> dict[str, str]:
    """Return the paths of the reward workers' classes by domain."""
    matches = (re.fullmatch(r"rewards\.(\w+)\.worker_cls", key) for key in config.values)
    return {match[1]: str(config[match[0]]) for match in matches if match}


def find_reward_problem(config: PeerConfig) -> str | None:
    """Return why no reward of the file has a counterpart; None if one has, or if there is none."""
    problems = []
    for domain, path in list_workers(config).items():
        try:
            _convert_domain(domain, path, config)
        except InvalidValue as problem:
            problems.append(f"{path.rpartition('.')[2]}: {problem}")
        else:
            return None
    return "; ".join(sorted(problems)) or None


def _convert_domain(
    domain: str, path: str, config: PeerConfig
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a domain's rewards, and the judges that they need.

    Raises InvalidValue if the domain's worker has no counterpart.
    """
    name = path.rpartition(".")[2]
    if name == JUDGE_WORKER:
        return _convert_judge(domain, config)
    if name not in REWARDS:
        raise InvalidValue(shared.USER_REWARD)
    sections = [dict(section) for section in REWARDS[name]]
    for section in sections:
        if section["kind"] == "crossthinkqa":
            credit = config[f"rewards.{domain}.reward_type"]
            section["credit"] = credit if credit in CREDITS else "loose"
    return sections, []


def _convert_judge(
    domain: str, config: PeerConfig
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a judge's reward with its model: one of the run, or one at an endpoint.

    Raises InvalidValue for a judge that is asked in unknown words, or that has no model.
    """
    role = f"rewards.{domain}"
    if config[f"{role}.judge_prompt"] != JUDGE_PROMPT:
        raise InvalidValue(
            f"judge_prompt is not {JUDGE_PROMPT}, so ROLL asks for a number and reads YES or NO. "
            "Write a reward of kind judge with a prompt of your own"
        )
    reward: dict[str, Any] = {"kind": "judge", "verdict": "yes_no", "rubric": RUBRIC}
    if config[f"{role}.generating_args.max_new_tokens"] is not None:
        reward["max_tokens"] = config.whole(f"{role}.generating_args.max_new_tokens")
    if config[f"{role}.generating_args.temperature"] is not None:
        reward["temperature"] = config.number(f"{role}.generating_args.temperature")
    kind = config[f"{role}.judge_model_type"]
    if kind == "api":
        url = config[f"{role}.judge_api_url"]
        model = config[f"{role}.judge_model_name"]
        if not url or not model:
            raise InvalidValue(
                "the judge needs judge_api_url and judge_model_name. Set both, or a reward of "
                "kind judge with url and model"
            )
        return [{**reward, "url": url, "model": model, "api_key_env": "JUDGE_API_KEY"}], []
    if kind not in ("inference", "cluster"):
        raise InvalidValue(f"judge_model_type={kind} is not known. Set api, inference or cluster")
    place = role if kind == "inference" else "reward_model"
    path = config[f"{place}.model_args.model_name_or_path"]
    if not path:
        raise InvalidValue(f"the judge has no model. Set {place}.model_args.model_name_or_path")
    judge = {"name": domain, "path": path, "generator": _make_generator(place, config)}
    return [{**reward, "judge": domain}], [judge]


def _make_generator(place: str, config: PeerConfig) -> dict[str, Any]:
    """Return the judge's generator, in processes of its own as there."""
    strategy = config[f"{place}.strategy_args.strategy_name"]
    worker, replicas = make_vllm(place, config)
    if strategy != "vllm":
        worker = {"kind": "hf" if strategy == "hf_infer" else "engine"}
    return {"kind": "workers", "workers": replicas, "worker": worker}


def inert_judge_key(value: Any, config: PeerConfig) -> Inert:
    """Return the result for a key that no converted judge uses."""
    return Inert("no reward that is converted reads it")


def convert_cut(value: Any, config: PeerConfig) -> Any:
    """Convert a judge's top_p or top_k, which have no counterpart unless they are off."""
    if numbers.number(value) in (-1, 0, 1):
        return Inert("it is off there")
    return Dropped(CUT_NOTE)
