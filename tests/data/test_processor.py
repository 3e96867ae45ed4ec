"""Media in rendered conversations: which tokens stand for them, where they lie, and what is
refused."""

import base64
import pickle
from dataclasses import replace

import numpy as np
import pytest
from pictures import FAMILIES, asked, model_directory, picture, processor, renderer

from ratchet.config.media_limits import MediaConfig
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.data.processor import load_processor
from ratchet.errors import DataError, ModelError
from ratchet.types import Message, Part

PAD, START, END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"


def text(made, tokens):
    return made.tokenizer.decode(list(tokens), skip_special=False)


def file_of(part):
    return base64.b64decode(part.value.partition(",")[2])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_placeholder_becomes_as_many_tokens_as_the_model_gives_embeddings(family):
    made = renderer(family)
    messages = [asked(picture(1), "a", picture(2, 48, 32))]
    tokens = made.prompt(messages)
    shown = f"{START}{PAD * 4}{END}a{START}{PAD * 6}{END}"  # 2 x 2 and 3 x 2 pairs of patches
    assert text(made, tokens) == f"<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n"
    first, second = made.media(tokens, messages)
    assert [(one.start, one.medium.span) for one in (first, second)] == [(7, 4), (14, 6)]
    assert [
        text(made, tokens[one.start : one.start + one.medium.span]) for one in (first, second)
    ] == [PAD * 4, PAD * 6]
    assert first.medium.inputs["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert first.medium.inputs["pixel_values"].shape == (16, 3 * 2 * 8 * 8)
    assert first.medium.source == file_of(messages[0].content[0])


def test_pixels_are_those_of_the_picture():
    """Red, on a scale of -1 to 1, as the processor is told: mean and deviation 0.5."""
    from PIL import Image

    from ratchet.data.formats.media import embed

    one = processor().expand(embed(Image.new("RGB", (16, 16), (255, 0, 51))), where="x").medium
    pixels = one.inputs["pixel_values"].reshape(4, 3, -1)
    assert np.allclose(pixels[:, 0], 1.0)
    assert np.allclose(pixels[:, 1], -1.0)
    assert np.allclose(pixels[:, 2], -0.6, atol=1e-6)


def test_equal_media_are_one_object_and_the_key_says_how_they_were_processed(tmp_path):
    made, again = processor(), load_processor(model_directory())
    part = picture(1)
    (tmp_path / "a.png").write_bytes(file_of(part))
    one = made.expand(part, where="x").medium
    assert made.expand(Part("image", str(tmp_path / "a.png")), where="y").medium is one
    assert again.expand(part, where="x").medium.key == one.key
    assert made.expand(picture(2), where="x").medium.key != one.key
    other = load_processor(model_directory("qwen3_vl"))
    assert other.expand(part, where="x").medium.key != one.key
    assert pickle.loads(pickle.dumps([one, one]))[0].key == one.key


def test_what_is_remembered_has_bounds():
    small = load_processor(model_directory(), media=MediaConfig(remembered_mib=0.06))
    first = small.expand(picture(1), where="x").medium
    assert small.expand(picture(1), where="x").medium is first
    for seed in range(2, 8):
        small.expand(picture(seed), where="x")
    assert small.expand(picture(1), where="x").medium is not first
    assert len(small._expanded_by_key) <= 3, "each is about 0.025 MiB"


def test_what_users_type_is_no_placeholder():
    made = renderer()
    messages = [asked(f"{PAD} and ", picture(1), f" {START}{PAD}{END}")]
    tokens = made.prompt(messages)
    assert tokens.count(made.tokenizer.token_id(PAD)) == 4
    assert text(made, tokens).count(PAD) == 4 + 2
    (one,) = made.media(tokens, messages)
    assert tokens[one.start : one.start + 4] == [made.tokenizer.token_id(PAD)] * 4


def test_supervised_rows_train_on_no_token_of_a_medium():
    made = renderer()
    messages = [
        asked(picture(1), "?"),
        Message("assistant", "a"),
        asked(picture(2, 48)),
        Message("assistant", "bc"),
    ]
    tokens, trainable = made.supervised(messages, train="all")
    assert (
        text(made, [token for token, on in zip(tokens, trainable, strict=True) if on])
        == "a<|im_end|>bc<|im_end|>"
    )
    assert [one.medium.span for one in made.media(tokens, messages)] == [4, 6]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_appended_to_a_sampled_turn_is_what_the_whole_conversation_has_there(family):
    made = renderer(family)
    history = [asked(picture(1), "?")]
    prompt = made.prompt(history)
    sampled = [*made.tokenizer.encode("left"), made.tokenizer.token_id("<|im_end|>")]
    answers = [asked("now:", picture(2, 48), picture(1))]
    added = made.extend(sampled, answers, history=history)
    conversation = [*history, Message("assistant", "left"), *answers]
    assert [*prompt, *sampled, *added] == made.prompt(conversation)
    whole, later = made.media(made.prompt(conversation), conversation), made.media(added, answers)
    start = len(prompt) + len(sampled)
    assert [(start + one.start, one.medium.key) for one in later] == [
        (one.start, one.medium.key) for one in whole[1:]
    ]


def test_messages_and_placeholders_have_to_agree():
    tokenizer = load_tokenizer(model_directory())
    twice = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' "
        "%}<|image_pad|><|image_pad|>{% endif %}"
    )
    doubled = Renderer(
        tokenizer, twice + "{% endfor %}{{ m.role }}{% endfor %}", processor=processor()
    )
    none = Renderer(
        tokenizer, "{% for m in messages %}{{ m.role }}{% endfor %}", processor=processor()
    )
    for made, words in (
        (doubled, "1 x image, .* placeholders for 2 x image"),
        (none, "1 x image, .* for no media"),
    ):
        with pytest.raises(DataError, match=words):
            made._expand_placeholders([(t, None) for t in tokenizer.encode(made.template.render([asked(picture(1))], None, prompt=True),
                                                                 allow_special=True)], [asked(picture(1))])  # fmt: skip
    made = renderer()
    with pytest.raises(DataError, match="not all of them are in the tokens"):
        made.media(made.prompt([asked(picture(1))]), [asked(picture(1), picture(2))])
    with pytest.raises(DataError, match="not all of them are in the tokens"):
        made.media(made.prompt([asked(picture(1))]), [asked(picture(2, 48))])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            Part("audio", "data:audio/wav;base64,AAAA"),
            "message 1 has a part of the type 'audio', and the model reads image",
        ),
        (
            Part("image", "data:image/png;base64,AAAA"),
            "message 1: data:image/png;base64,...: is not an image of a supported format",
        ),
        (
            Part("image", "data:image/png;base64,"),
            "message 1: data:image/png;base64,...: the file is empty",
        ),
        (Part("image", "/nowhere/a.png"), "message 1: /nowhere/a.png: can't be read"),
        (Part("image", "https://localhost:1/a.png"), "message 1: .*urls: true"),
    ],
)
def test_bad_media_are_named_with_their_message(content, words):
    with pytest.raises(DataError, match=words):
        renderer().prompt([Message("system", "s"), asked(content)])


def test_a_damaged_picture_and_one_that_the_processor_refuses():
    part = picture(1, 64, 64)
    head, _, body = part.value.partition(",")
    cut = replace(part, value=f"{head},{body[: len(body) // 8 * 4]}")
    with pytest.raises(
        DataError, match=r"message 0: data:image/png;base64,\.\.\.: .*damaged or cut off"
    ):
        renderer().prompt([asked(cut)])
    with pytest.raises(DataError, match=r"the model's processor refuses the image: .*aspect ratio"):
        renderer().prompt([asked(picture(1, 2010, 10))])


def test_a_model_of_text_alone_says_that_it_reads_no_pictures(tmp_path):
    tokenizer = load_tokenizer(model_directory())
    with pytest.raises(
        DataError, match="message 0 has a part of the type 'image', and the model reads only text"
    ):
        Renderer(tokenizer).prompt([asked(picture(1))])
    assert Renderer(tokenizer).media([1, 2], [Message("user", "u")]) == ()
    assert Renderer(tokenizer).find_media_token([tokenizer.token_id(PAD)]) is None
    assert load_processor(tmp_path) is None
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(ModelError, match="can't read the processor"):
        load_processor(tmp_path)


def test_a_policy_that_writes_a_placeholder_is_noticed():
    made = renderer()
    ids = made.tokenizer.token_id
    assert made.find_media_token(made.tokenizer.encode("a")) is None
    assert made.find_media_token([*made.tokenizer.encode("a"), ids(PAD)]) == PAD
    assert made.find_media_token([ids("<|video_pad|>")]) == "<|video_pad|>"


@pytest.mark.medium
def test_paths_stay_under_their_root(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("in/a.png", "b.png"):
        (tmp_path / name).write_bytes(file_of(picture(1)))
    bound = load_processor(model_directory(), media=MediaConfig(root=str(tmp_path / "in")))
    assert bound.expand(Part("image", "a.png"), where="x").medium.span == 4
    with pytest.raises(DataError, match="lies outside"):
        bound.expand(Part("image", "../b.png"), where="x")
