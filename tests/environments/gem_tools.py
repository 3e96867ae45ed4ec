"""A tool in gem's form, and a function that gives it to an environment."""

import re
from typing import Any


class HalvingTool:
    """Answers <half>N</half> with N // 2. Other texts are no calls."""

    tool_type = "halving"
    name = "half"

    def instruction_string(self):
        return "Write <half>N</half> to halve a number."

    def execute_action(self, action):
        call = re.search(r"<half>(.*?)</half>", action)
        if call is None:
            return False, True, "", action
        if not call[1].isdigit():
            return True, True, "no number", call[0]
        return True, False, f"Half: {int(call[1]) // 2}", call[0]


def with_halving(env):
    from gem.tools.tool_env_wrapper import ToolEnvWrapper

    tools: Any = [HalvingTool()]
    return ToolEnvWrapper(env, tools, tool_reward=0.25)
