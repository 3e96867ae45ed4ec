"""Variables of a chat template, by the recipe: the same wherever a model is used, also elsewhere."""

import pytest
from tiny_llama import make_llama
from transformers import AutoTokenizer

from ratchet.commands.model_target import open_target
from ratchet.config.loader import load_config
from ratchet.config.resolve import build, resolve
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.template_defaults import remove_defaults, set_defaults
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.errors import ConfigError, DataError
from ratchet.executors.freeze import freeze
from ratchet.training.from_config import _identify as identify
from ratchet.training.from_config import build_policy, build_renderer
from ratchet.types import Message

TEMPLATE = """\

{%- macro lead() -%}{{- "[" ~ effort ~ "]" if effort is defined else "" -}}{%- endmacro -%}
{%- for message in messages -%}
{{- "<|" + message.role + "|>" + message.content + "<|end|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|assistant|>" + lead() -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- "<think>\\n\\n</think>" -}}{%- endif -%}
{%- endif -%}
"""
HELLO = (Message("user", "Hi"),)
OFF = {"enable_thinking": False}


@pytest.fixture
def model(tmp_path):
    directory = make_llama(tmp_path / "model", ["Hi <think> </think> [low]"])
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def recipe(model, variables):
    """The path of a recipe for the model, beside it."""
    path = model.parent / "recipe.yaml"
    path.write_text(
        f"threads: 1\nmodel: {{path: {model}}}\nalgorithm: {{kind: sft}}\nsteps: 1\nbatch_size: 1\n"
        f"environment: {{kind: arithmetic}}\ntokenizer: {{chat_template_kwargs: {variables}}}\n"
    )
    return path


def shown(renderer):
    return renderer.tokenizer.decode(renderer.prompt(HELLO), skip_special=False)


@pytest.mark.parametrize(
    "variables",
    [
        OFF,
        {"enable_thinking": True},
        {"effort": 'a "b"\n\\ é😀'},
        {"effort": [None, 1.5, {"a": True}]},
    ],
)
def test_defaults_render_as_transformers_does_with_the_variables(model, tmp_path, variables):
    tokenizer = build(resolve("tokenizer", {"chat_template_kwargs": variables}), str(model))
    tokenizer.save(tmp_path / "saved")
    messages = [{"role": "user", "content": "Hi"}]
    original, saved = map(AutoTokenizer.from_pretrained, (model, tmp_path / "saved"))
    options = {"tokenize": False, "add_generation_prompt": True}
    expected = original.apply_chat_template(messages, **options, **variables)
    assert saved.apply_chat_template(messages, **options) == expected
    rendered = Renderer(tokenizer).template.render(HELLO, None, prompt=True)
    assert rendered == expected
    assert (
        rendered != original.apply_chat_template(messages, **options)
        or variables["enable_thinking"]
    )
    overridden = saved.apply_chat_template(messages, **options, enable_thinking=True, effort="x")
    assert overridden.endswith("<|assistant|>[x]")


def test_training_evaluation_chat_and_the_exported_model_render_the_same(model, tmp_path):
    path = recipe(model, "{enable_thinking: false}")
    config = freeze(load_config(path))
    policy = build_policy(config)
    renderers = [policy.renderer, build_renderer(config, policy.tokenizer, None)]
    renderers.append(open_target(model, path).policy.renderer)
    policy.tokenizer.save(tmp_path / "export")
    renderers.append(Renderer(load_tokenizer(tmp_path / "export")))
    expected = "<|user|>Hi<|end|><|assistant|><think>\n\n</think>"
    assert [shown(renderer) for renderer in renderers] == [expected] * 4


def test_a_template_that_the_recipe_names_has_the_values_too(tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text(TEMPLATE)
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "threads: 1\nmodel: {preset: tiny}\nalgorithm: {kind: sft}\nsteps: 1\nbatch_size: 1\n"
        "environment: {kind: arithmetic}\n"
        f"tokenizer: {{kind: bytes, template: {template}, chat_template_kwargs: {OFF}}}\n"
    )
    config = freeze(load_config(path))
    policy = build_policy(config)
    renderers = [policy.renderer, build_renderer(config, policy.tokenizer, None)]
    expected = "<|user|>Hi<|end|><|assistant|><think>\n\n</think>"
    assert [shown(renderer) for renderer in renderers] == [expected] * 2


def test_a_tokenizer_of_the_recipe_may_get_other_defaults_than_the_saved_one(tmp_path):
    keys = {"kind": "characters", "template": TEMPLATE}
    plain, off = (
        build(resolve("tokenizer", {**keys, "chat_template_kwargs": variables}), None)
        for variables in ({"effort": "low"}, OFF)
    )
    assert plain.fingerprint != off.fingerprint
    assert identify(plain) == identify(off)


def test_defaults_are_replaced_and_not_repeated():
    once = set_defaults(TEMPLATE, OFF)
    assert set_defaults(once, OFF) == once
    assert set_defaults(once, {"effort": "low"}) == set_defaults(TEMPLATE, {"effort": "low"})
    assert remove_defaults(once) == TEMPLATE == set_defaults(TEMPLATE, {})


def test_a_variable_that_the_template_does_not_read_is_refused():
    with pytest.raises(DataError, match="does not read 'enable_thinkin'; it reads add_gen"):
        set_defaults(TEMPLATE, {"enable_thinkin": False})


@pytest.mark.parametrize("name", ["messages", "bos_token", "a b"])
def test_what_every_rendering_sets_is_refused(model, name):
    with pytest.raises(ConfigError, match="is not a variable that can be set"):
        load_config(recipe(model, f"{{'{name}': 1}}"))
