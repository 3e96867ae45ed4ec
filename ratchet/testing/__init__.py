from ratchet.testing.environments import check_environment
from ratchet.testing.rewards import answered, check_reward, conversation

__all__ = ["answered", "check_environment", "check_reward", "conversation"]
