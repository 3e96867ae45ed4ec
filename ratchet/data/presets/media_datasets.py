"""Presets of published image, audio and video datasets (text: `ratchet.data.presets.datasets`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.data.formats import benchmark_rows
from ratchet.data.presets.datasets import BOXED_REQUEST, ROWS_AND_PAIRS, Preset

ANSWER_TAGS_REQUEST = "\nThink first, and give the answer in <answer></answer>."
TAGGED_ANSWER_REWARD: Mapping[str, Any] = {
    "kind": "exact_match",
    "marked": True,
    "ignore_case": True,
}


def _make_intent_preset(hub: str, train: str = "", test: str = "") -> Preset:
    """Return the preset of HumanOmniV2's data at this id of the Hub (arXiv:2506.21277)."""
    return Preset(
        hub,
        {
            "videos": "video",
            "audio": "audio",
            "prompt": benchmark_rows.PROMPT_COLUMN,
            "answer": "answer",
        },
        train=train,
        test=test,
        prompt="{asked}" + ANSWER_TAGS_REQUEST,
        keep=(
            {"column": "problem_type", "one_of": ("multiple choice",)},
            {"column": "data_type", "none_of": ("image",)},
        ),
        convert_row=benchmark_rows.convert_intent,
        reward=TAGGED_ANSWER_REWARD,
        description="what people in a video intend, with its sound, arXiv:2506.21277",
    )


MEDIA_PRESETS: Mapping[str, Preset] = {
    # Columns: image, problem, solution ("<answer> 3 </answer>"); split train. Other parts of
    # CLEVR-CoGenT are separate datasets: Clevr_CoGenT_ValA, Clevr_CoGenT_ValB. Columns checked
    # against: NeMo RL's clevr loader and its test, other code that reads it.
    "clevr_cogent": Preset(
        "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex",
        {"images": "image", "prompt": "problem", "answer": "answer", "solution": "solution"},
        prompt="{problem}" + ANSWER_TAGS_REQUEST,
        convert_row=benchmark_rows.read_answer_tags,
        reward=TAGGED_ANSWER_REWARD,
        description="questions about rendered scenes, arXiv:1612.06890",
    ),
    # Columns: images (one a row), problem ("<image>..."), answer; splits train, validation, test.
    # Columns checked against: its card, NeMo RL's geometry3k loader.
    "geometry3k": Preset(
        "hiyouga/geometry3k",
        {"images": "images", "prompt": "problem", "answer": "answer"},
        test="test",
        prompt="{problem}" + BOXED_REQUEST,
        reward="math",
        description="geometry with diagrams, arXiv:2105.04165",
    ),
    # Columns: image_path ("coco/train2014/COCO_..."), bbox [x1, y1, x2, y2] in pixels, captions
    # [...], sentences, raw_image_info, file_name, split, ...; splits train, validation, test
    # (testA), testB. The images are COCO's train2014: media_root is the directory with coco/ in it.
    # Columns checked against: its card, NeMo RL's refcoco loader, TRL's recipe (boxes are xyxy).
    "refcoco": Preset(
        "jxu124/refcoco",
        {"images": "image_path", "prompt": "captions", "answer": "bbox"},
        test="validation",
        prompt="Give the box [x1, y1, x2, y2], in pixels, around what this describes: {captions.0}",
        reward="bounding_box",
        description="objects that a phrase refers to, Yu et al. (2016), arXiv:1608.00272",
    ),
    # Columns: image (a path, or several), question ("<image>\n..."), chosen, rejected; since 1.2
    # also answer_gt, image_wh. The Hub has zip files and a meta.json, which gives the image
    # directory of each annotation file as `root`: give one annotation file as train, and its image
    # directory as media_root. Columns checked against: the features on its card, NeMo RL's mmpr
    # loader.
    "mmpr": Preset(
        "OpenGVLab/MMPR-v1.2",
        {"images": "image", "prompt": "question", "chosen": "chosen", "rejected": "rejected"},
        data_kinds=ROWS_AND_PAIRS,
        description="pairs of reasoning about images, arXiv:2411.10442",
    ),
    # Columns: audio, question ("...\nChoices:\nA. ...\nB. ..."), answer ("B. ..."); splits train,
    # validation. Only the sound of each video is included; "video" in a question means that sound.
    # `asked` is the question as `convert_avqa` rewrites it. Columns checked against: NeMo RL's avqa
    # loader, other code that reads it; no card.
    "avqa": Preset(
        "gijs/avqa-processed",
        {"audio": "audio", "prompt": "question", "answer": "answer"},
        test="validation",
        prompt='{asked}\nEnd with "The answer is X", where X is the letter of your choice.',
        convert_row=benchmark_rows.convert_avqa,
        reward={"kind": "multiple_choice", "letters": "ABCD"},
        description="questions about sounds, doi:10.1145/3503161.3548291",
    ),
    # Columns: audio_path (below the dataset's directory, which is media_root), question, choices
    # [...], answer (the text of a choice), source_dataset, ...; one file, data.jsonl. Columns
    # checked against: NeMo RL's audiomcq loader.
    "audiomcq": Preset(
        "Harland/AudioMCQ-StrongAC-GeminiCoT",
        {"audio": "audio_path", "prompt": benchmark_rows.PROMPT_COLUMN, "answer": "answer"},
        prompt="{asked}" + ANSWER_TAGS_REQUEST,
        convert_row=benchmark_rows.list_choices,
        reward=TAGGED_ANSWER_REWARD,
        description="questions that need the sound itself",
    ),
    # Columns: audio, question, choices [...], answer (the text of a choice), and more; split
    # v05.15.25. Columns checked against: NeMo RL's mmau loader.
    "mmau": Preset(
        "TwinkStart/MMAU",
        {"audio": "audio", "prompt": benchmark_rows.PROMPT_COLUMN, "answer": "answer"},
        train="",
        test="v05.15.25",
        prompt="{asked}" + ANSWER_TAGS_REQUEST,
        convert_row=benchmark_rows.list_choices,
        reward=TAGGED_ANSWER_REWARD,
        description="speech, sounds and music, for evaluation, arXiv:2410.19168",
    ),
    # Columns: video_id, Question, Choice ["A. ...", ...], Answer (a letter), and more; one file,
    # qa.json, and Videos.tar, which is unpacked in media_root. Columns checked against: NeMo RL's
    # daily_omni loader.
    "daily_omni": Preset(
        "liarliar/Daily-Omni",
        {
            "videos": "video",
            "audio": "audio",
            "prompt": benchmark_rows.PROMPT_COLUMN,
            "answer": "Answer",
        },
        convert_row=benchmark_rows.convert_daily_omni,
        reward={"kind": "multiple_choice", "letters": "ABCD"},
        description="videos with their sound, arXiv:2505.17862",
    ),
    # Columns: problem, problem_type, options ["A.first", ...], answer, path or video, data_type;
    # files emer_rewrite.json and social_iq_v2_rewrite.json, and videos.zip, which is unpacked in
    # media_root. The sound is that of the same file. Columns checked against: NeMo RL's intent
    # loader, which keeps the same rows.
    "intent_train": _make_intent_preset("PhilipC/IntentTrain", train="train"),
    # The same columns; file qa.json, and videos.zip.
    "intent_bench": _make_intent_preset("PhilipC/IntentBench", test="train"),
}
