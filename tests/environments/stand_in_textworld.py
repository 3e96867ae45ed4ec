"""A stand-in for the package textworld: in each game, opening the box and taking the key wins."""

from types import SimpleNamespace

COMMANDS = ("open box", "take key")


class EnvInfos:
    def __init__(self, **wanted):
        self.wanted = wanted


class Game:
    def __init__(self, path):
        self.path = path

    def reset(self):
        self.score = 0
        return self._state("Welcome!\n\n>  -= Attic =-0/0")

    def step(self, command):
        if command == COMMANDS[self.score]:
            self.score += 1
        state = self._state(f"You {command}.\n\n>  -= Attic =-{self.score}/1")
        return state, float(state.score), state.won

    def _state(self, feedback):
        won = self.score == len(COMMANDS)
        return SimpleNamespace(
            admissible_commands=["look", COMMANDS[self.score % 2]],
            description=f"-= Attic =-\nStage {self.score}.",
            feedback=feedback,
            inventory="You carry nothing.",
            max_score=0 if "unscored" in self.path else len(COMMANDS),
            objective="Take the key out of the box.",
            score=self.score,
            won=won,
        )

    def close(self):
        self.path = None


def start(path, infos):
    return Game(path)
