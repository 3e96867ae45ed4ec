"""A server of the Open Reward Standard that errs as told."""

from __future__ import annotations

import json

from rewards.fake_http import Answer, Fake

STARTING = Answer("", 503, {"x-backend-state": "starting"})


def events(*pairs):
    return "".join(f"event: {name}\r\ndata: {data}\r\n\r\n" for name, data in pairs)


def result(text="ok", **output):
    blocks = [{"type": "text", "text": text}]
    return json.dumps({"ok": True, "output": {"blocks": blocks, **output}})


class Stub:
    """A server with one environment, `box`. `answers` replaces those of its paths, by their end;
    an answer in a set of one is given once."""

    fake = Fake()

    def __init__(self, **answers):
        self.answers = answers

    def __call__(self, body, number):
        path = self.fake.seen[number][0].rpartition("/")[2]
        answer = self.answers.get(path)
        if isinstance(answer, tuple):
            (answer,) = answer
            del self.answers[path]
        return self.usual(path, number) if answer is None else answer

    def usual(self, path, number):
        tool = {"name": "open", "description": "Opens.", "input_schema": None}
        listed = {"tools": [tool], "terminal_tool": {"name": "answer", "arg": "text"}}
        text = result(reward=0.5, finished=True)
        return {
            "list_environments": ["box"],
            "splits": [{"name": name, "type": "train"} for name in ("train", "test")],
            "num_tasks": {"num_tasks": 3},
            "create_session": events(("task_id", f"session-{number}"), ("end", "")),
            "task_tools": listed,
            "messages": Answer({"detail": "Not Found"}, 404),
            "prompt": [{"type": "text", "text": "Open it."}],
            "call": events(("task_id", "1"), ("chunk", text[:9]), ("end", text[9:])),
        }.get(path, {})
