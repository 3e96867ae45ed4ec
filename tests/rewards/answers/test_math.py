import asyncio
import importlib.util

import pytest

from ratchet.errors import MissingDependency
from ratchet.rewards.answers import math as module
from ratchet.rewards.answers.math import Math, MathConfig, extract_formula
from ratchet.rewards.process_pool.pool import RewardWorkers
from ratchet.testing import answered, check_reward
from ratchet.types import Failed, Message, Task, Truncated


def task(answer) -> Task:
    return Task("t/0", (Message("user", "solve"),), answer=answer)


def outcomes(reward, rows):
    async def judged():
        pairs = [(answered(task(gold), text), task(gold)) for text, gold in rows]
        return [(await reward.score([trajectory], about))[0] for trajectory, about in pairs]

    return asyncio.run(judged())


def rewards(reward, rows):
    return [outcome.reward for outcome in outcomes(reward, rows)]


PLAIN_RIGHT = [
    (r"\boxed{9AM}", "9 AM"),
    (r"\boxed{0.5}", r"\frac12"),
    ("so $x = 5$.", "5"),
    ("It is 1,000", "1000"),
    (r"\boxed{\text{East}}", "East"),
    ("<answer>7</answer>", "7"),
    ("#### 7", r"\boxed{7}"),
    ("first $3$, then 4", "4"),
    ("#### negative 5", "-5"),
    ("**5**", "5"),
    ("answer: −5", "-5"),
    (r"\boxed{\text{minus }5}", "-5"),
    (r"\boxed{\text{Even}}", "even"),
    (r"\boxed{b = 2, a = 1}", "b=2, a=1"),
    (r"\boxed{5 dollars}", r"\$5"),
    (r"\boxed{-USD 5}", "-5"),
    (r"\boxed{No}", "no"),
    (r"The answer is \$5.", "5"),
    (r"**Answer:** 5\text{ cm}", "5"),
    (r"So the value is \frac{1}{2}.", "0.5"),
    (r"\boxed{1 = 100\%}", r"1 = 100\%"),
    (r"\boxed{5 km/h}", "5"),
    (r"\boxed{5 kilometers per hour}", r"5\text{ km/h}"),
    (r"\boxed{5 metres}", r"5\text{ m}"),
    (r"\boxed{7{:}30}", "7:30"),
    (r"\boxed{60 miles per hour}", r"60\text{ mph}"),
    (r"\boxed{-€5}", "-5"),
    (r"\boxed{5 euros}", "5"),
    (r"\boxed{5 hundred dollars}", "500"),
    (r"\boxed{5 million}", "5,000,000"),
    (r"\boxed{5000}", r"5\text{ thousand dollars}"),
    (r"\boxed{\$5 million}", "5 million dollars"),
    (r"\boxed{9 AM}", "9 a.m."),
    (r"\boxed{12:30 PM}", r"12:30\text{ PM}"),
    (r"\boxed{12 cm^2}", r"12\text{ cm}^{2}"),
    (r"\boxed{\frac 1 2}", r"\frac12"),
    (r"\boxed{\text{5 cm}}", "5"),
    (r"\boxed{\$5\text{ per hour}}", r"5\text{ dollars per hour}"),
    (r"\boxed{f(2) = 2}", "2"),
    (r"\boxed{20^\circ\text{C}}", "20"),
    (r"\boxed{20 degrees Celsius}", r"20℃"),
    (r"\boxed{36\text{ sq. inches}}", r"36\text{ in}^2"),
    (r"\boxed{x \equiv 7 \pmod{10}}", "7"),
    (r"\boxed{7\ (\text{mod }10)}", r"7 \pmod{10}"),
    (r"\boxed{10_{10}}", "10_{10}"),
    (r"\boxed{\boldsymbol{5}}", "5"),
    (r"\boxed{\approx 3.14}", "3.14"),
    (r"\boxed{2\text{ to }1}", "2:1"),
    (r"\boxed{9.8 m/s^2}", r"9.8\text{ m/s}^2"),
    (r"\boxed{1, 2, \dots, n}", r"1,2,\ldots,n"),
]
ALGEBRA_RIGHT = [
    (r"\boxed{2+4=6}", "6"),
    (r"\boxed{\frac{\sqrt{8}}{2}}", r"\sqrt{2}"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    (r"\boxed{3, 2}", r"\{2, 3\}"),
    (r"\boxed{4/2 = 2}", "2"),
    (r"\boxed{[0, \infty)}", r"x \ge 0"),
    (r"\boxed{\begin{pmatrix} 2/2 \\ 2 \end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\boxed{2\pi}", r"\pi + \pi"),
    (r"\boxed{2^{10}}", "1024"),
    (r"hence $\frac{6}{8}\pi$ holds", r"\frac{3\pi}{4}"),
    (r"hence \(\frac{6}{8}\pi\) holds", r"\frac{3\pi}{4}"),
    ("2x + 1", "1 + 2x"),
    (r"\boxed{cab}", "abc"),  # a product
    (r"\boxed{101}", "101_2"),
    (r"\boxed{\frac{1}{3}}", r"0.\overline{3}"),
    (r"\boxed{-2.1\overline{36}}", r"-\frac{47}{22}"),
    (r"\boxed{6:4:2}", "3:2:1"),
    (r"\boxed{3:2:1}", "a:b:c = 3:2:1"),
    (r"\boxed{x = 2 \lor x = 1}", "1, 2"),
    (r"\boxed{2 \text{ or } 1}", r"x = 1 \vee x = 2"),
    (r"\boxed{6.02e23}", r"6.02 \times 10^{23}"),
    (r"\boxed{2√3}", r"\sqrt{12}"),
    (r"\boxed{(a)(b)}", "ab"),
    (r"\boxed{(a)\ 5\ (b)\ 6}", "(a) 5 (b) 6"),
    (r"\boxed{x² + 2x + 1}", "(x+1)^2"),
    (r"\boxed{(−∞, 1) ∪ [2, ∞)}", r"(-\infty,1)\cup[2,\infty)"),
    (r"\boxed{3×10⁴}", "30000"),
    ("<answer>The share is $\\frac{1}{2}$.</answer>", "0.5"),
    (r"\boxed{\frac{2}{4}\text{ of the pie}}", r"\frac12"),
    (r"\boxed{\log_2 8}", "3"),
    (r"\boxed{4m^2 + 2s^2}", "2s^2 + 4m^2"),
    (r"\boxed{x \ge 1}", r"[1,\infty)"),
    (r"\boxed{1 < x \le 2}", "(1,2]"),
    (r"\boxed{2, 1, 2}", "1,2,2"),
    (r"\boxed{\frac12, 0.5, 1}", r"1, \frac12, \frac12"),
    (r"\boxed{1, 1, 2}", r"\{1, 2\}"),
    (r"\boxed{(1, 2)}", "1, 2"),
    (r"\boxed{\ln 2}", r"\log_e 2"),
    (r"\boxed{\langle 0.5, 2\rangle}", r"(\frac12, 2)"),
    (r"\boxed{5t + 20}", "20 + 5t"),
    (r"\boxed{-t + n}", "n - t"),
    (r"\boxed{2 f'(x) f(x)}", r"2f(x) f^{\prime}(x)"),
    (r"\boxed{f'(x) = 2x}", "x+x"),
    (r"\boxed{6+4\sqrt{2} m}", r"4\sqrt{2}+6"),
    (r"\boxed{5 mph}", "5"),
    (r"\boxed{b}", r"\text{(B)}"),
    (r"\boxed{b}", "B"),
    (r"\boxed{-r+R}", "R-r"),
    (r"\boxed{10_{10}}", "10"),
    (r"\boxed{16\times 10^{-20}}", r"1.6\times 10^{-19}"),
    (r"\boxed{0.1x+0.2}", r"\frac{x}{10}+\frac15"),
    (r"\boxed{\left(\frac12, 1.5\right)}", r"(0.5, \frac32)"),
    (r"\boxed{2^{-2013}}", r"\frac{1}{2^{2013}}"),
    (r"\boxed{\sin 30^\circ}", "0.5"),
    (r"\boxed{x<1 or x>2}", r"(-\infty,1)\cup(2,\infty)"),
    (r"\boxed{(-\infty,1)\cup(2,\infty)}", r"x<1 \text{ or } x>2"),
    (r"\boxed{\{x \in \mathbb{R} \mid 1 \leqslant x < 2\}}", "[1,2)"),
    (r"\boxed{\{x : x < 1 \text{ or } x > 2\}}", r"(-\infty,1)\cup(2,\infty)"),
    (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", "(1,2)"),
    (r"\boxed{(3,2,1)}", r"\begin{bmatrix} 3 \\ 2 \\ 1 \end{bmatrix}"),
    (r"\boxed{\frac{\sqrt5-1}{2}, \frac{-1-\sqrt5}{2}}", r"\frac{-1\pm\sqrt{5}}{2}"),
    (r"\boxed{\sqrt{-4}}", "2i"),
    (r"\boxed{e^{i\pi/4}}", r"\frac{1+i}{\sqrt2}"),
    (r"\boxed{\lg 5}", r"\log_{10} 5"),
    (r"\boxed{\sqrt\frac14+\frac\pi6}", r"\frac12+\frac{\pi}{6}"),
]
WRONG = [
    (r"\boxed{6+4\sqrt{2}\text{ cm}}", r"6+4\sqrt{2}\text{ m}"),
    (r"\boxed{2-3 hours}", "2-3 minutes"),
    (r"\boxed{12 cm²}", "12 km²"),
    (r"\boxed{2}", r"2\,\text{h}\,30\,\text{min}"),
    (r"\boxed{2}", r"2\text{ hours and }30\text{ minutes}"),
    (r"\boxed{\frac{1}{3}}", r"\frac12"),
    (r"\boxed{2x}", "2y"),
    (r"\boxed{5x}", "5"),
    (r"\boxed{(x+1)^2}", "x^2+1"),
    (r"\boxed{(1,2)}", "[1,2)"),
    (r"\boxed{2, 3, 4}", r"\{2, 3\}"),
    (r"\boxed{5", "5"),
    (r"\boxed{}", "5"),
    (r"\boxed{4} or 5", "5"),
    ("first $3$, then 4", "3"),
    ("", "5"),
    ("I do not know", "5"),
    (r"\boxed{West}", "East"),
    (r"\boxed{5 6}", "11"),
    (r"\boxed{5 \quad 6}", "11"),
    (r"\boxed{5 \text{ or } 6}", "5"),
    (r"\boxed{5, 6}", "5"),
    (r"\boxed{\pm 5}", "5"),
    ("#### minus 5", "5"),
    ("The answer is minus 5", "5"),
    ("answer: −5", "5"),
    (r"\boxed{seat}", "east"),
    (r"\boxed{CAB}", r"\text{BAC}"),
    (r"\boxed{101_3}", "101_{2}"),
    (r"\boxed{0.3}", r"0.\overline{3}"),
    (r"\boxed{0.\overline{12}}", r"0.1\overline{2}"),
    (r"\boxed{0.\overline{3}_8}", r"0.\overline{3}"),
    (r"\boxed{1:3:2}", "1:2:3"),
    (r"\boxed{3:2:1}", "3:2"),
    (r"\boxed{2}", r"x = 1 \lor x = 2"),
    (r"\boxed{x = 1 \vee x = 2}", "2"),
    (r"\boxed{5}", r"a = 1 \land b = 5"),
    (r"\boxed{\frac{1}{2}}", r"x \mapsto \frac{1}{2}"),
    (r"\boxed{\frac{1}{2} \cup 7}", r"\frac{1}{2}"),
    (r"\boxed{x = \frac{1}{2} \lor x = 7}", r"\frac{1}{2}"),
    (r"\boxed{x = 5}", "y = 5"),
    (r"\boxed{(a) 5 (b) 6}", "(a) 6 (b) 5"),
    (r"\boxed{\text{(i) } 2x,\ \text{(ii) } 3}", r"\text{(i) } 3,\ \text{(ii) } 2x"),
    (r"\boxed{10⁴}", "10"),
    (r"\boxed{5=6}", "6"),
    (r"\boxed{2+3=6}", "6"),
    (r"\boxed{5\text{ cm}}", r"5\text{ m}"),
    (r"\boxed{5\text{ km/h}}", r"5\text{ m/s}"),
    (r"\boxed{5 km/h}", r"5\text{ km}"),
    (r"\boxed{5 minutes}", "5 hours"),
    (r"\boxed{x = 5 = 6}", "6"),
    ("The answer is -USD 5.", "5"),
    ("so x = - 5", "5"),
    (r"So the value is \frac{1}{2}.", "2"),
    (r"\boxed{9\text{ AM}}", r"9\text{ p.m.}"),
    (r"\boxed{5 million}", r"5\text{ billion}"),
    (r"\boxed{5 million}", "5"),
    (r"\boxed{5\text{ million dollars}}", "5"),
    ("The answer is 5 thousand.", "5"),
    (r"\boxed{5}", "5a/b"),
    (r"\boxed{12\text{ cm}^2}", r"12\text{ m}^2"),
    (r"\boxed{12\text{ cm}^2}", r"12\text{ cm}^{3}"),
    (r"\boxed{10\text{ cents}}", r"\$10"),
    (r"\boxed{5 euros}", "5 dollars"),
    (r"\boxed{2\text{ hours } 30\text{ minutes}}", "2"),
    (r"\boxed{x^2 < 4}", "(-2, 2)"),  # perhaps the question
    (r"\boxed{x > 1}", r"[1,\infty)"),
    (r"\boxed{1,1,2}", "1,2,2"),
    (r"\boxed{1,2}", "1,2,2"),
    (r"\boxed{1 \text{ and } 1}", "1"),
    (r"\boxed{\left\{1, 2\right\}}", "(1,2)"),
    (r"\boxed{(1,2,3)}", r"\{1,2,3\}"),
    (r"\boxed{x \in (0,1)}", r"\{0,1\}"),
    (r"\boxed{\$5}", r"5\%"),
    (r"\boxed{5^\circ}", r"5\%"),
    (r"\boxed{\text{5 cm}}", r"\$5"),
    (r"\boxed{5\text{ dollars per hour}}", r"5\text{ cents per hour}"),
    (r"\boxed{\log_e 3}", r"\log_3 e"),
    (r"\boxed{n+2}", "n+2m"),
    (r"\boxed{6}", "4+2t"),
    (r"\boxed{2 f(x)^2}", "2 f(x) f'(x)"),
    (r"\boxed{f(1)=2}", "f(2)=2"),
    (r"\boxed{P(X=2)=0.3}", "P(X=1)=0.3"),
    (r"\boxed{10_2}", "10"),
    (r"\boxed{20^\circ C}", r"20^\circ\text{F}"),
    (r"\boxed{A}", "a"),
    (r"\boxed{r-R}", "R-r"),  # sympy's symbols are in lower case, so that both were 0
    (r"\boxed{3X}", "3x"),
    (r"\boxed{\angle ACB}", r"\angle ABC"),
    (r"\boxed{VI}", "IV"),
    (r"\boxed{56}", "5'6''"),
    (r"\boxed{2009}", "2020-05-06"),
    (r"\boxed{\{1,3,5,\ldots\}}", r"\{1,3,5\}"),
    (r"\boxed{100\text{ cubic meters}}", r"100\text{ square meters}"),
    (r"\boxed{60\text{ mph}}", r"60\text{ km/h}"),
    (r"\boxed{7 \pmod{11}}", r"7 \pmod{10}"),
    (r"\boxed{3.2\times 10^{-19}}", r"1.6\times 10^{-19}"),
    (r"\boxed{\sqrt{3}\times 10^{-20}}", r"\sqrt{2}\times 10^{-20}"),
    (r"\boxed{0.0}", "10^{-8}"),
    (r"\boxed{2^{-61}}", "2^{-60}"),
    (r"\boxed{2^{-2014}}", "2^{-2013}"),
    (r"\boxed{0.142857}", r"0.\overline{142857}"),
    (r"\boxed{x<1 and x>2}", r"(-\infty,1)\cup(2,\infty)"),
    (r"\boxed{\{x \in \mathbb{Z} \mid x > 1\}}", r"(1,\infty)"),
    (r"\boxed{\begin{pmatrix} 2 \\ 1 \end{pmatrix}}", "(1,2)"),
    (r"\boxed{\frac{3\pm\sqrt{5}}{2}}", r"\frac{3+\sqrt{5}}{2}"),
    (r"\boxed{\sqrt{4}}", "2i"),
    (r"\boxed{1}", r"\sin 90"),
]


@pytest.mark.needs("math_verify")
def test_equal_mathematics_is_right_and_other_mathematics_wrong():
    reward = Math(MathConfig(symbolic="required"))
    assert rewards(reward, PLAIN_RIGHT + ALGEBRA_RIGHT) == [1.0] * len(PLAIN_RIGHT + ALGEBRA_RIGHT)
    assert rewards(reward, WRONG) == [0.0] * len(WRONG)


def test_without_algebra_spellings_and_numbers_still_count():
    reward = Math(MathConfig(symbolic="never"))
    check_reward(reward, task("0.5"), good=r"\boxed{\frac{1}{2}}", bad=r"\boxed{0.51}")
    assert rewards(reward, PLAIN_RIGHT) == [1.0] * len(PLAIN_RIGHT)
    assert rewards(reward, WRONG) == [0.0] * len(WRONG)
    assert rewards(reward, ALGEBRA_RIGHT[:3]) == [0.0] * 3


def test_where_the_package_is_missing_auto_says_so_and_required_refuses(monkeypatch, caplog):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert rewards(Math(MathConfig()), PLAIN_RIGHT[:2] + ALGEBRA_RIGHT[:1]) == [1.0, 1.0, 0.0]
    assert "pip install 'ratchet-rl[rewards]'" in caplog.text
    with pytest.raises(MissingDependency, match="needs the package 'math-verify'"):
        Math(MathConfig(symbolic="required"))


def test_a_marker_can_be_required():
    reward = Math(MathConfig(symbolic="never", require_marker=True))
    assert rewards(reward, [("5", "5"), ("$5$", "5"), (r"\boxed{5}", "5")]) == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "formula"),
    [
        ("so $a$ and $b$.", "b"),
        ("$$a$$", "a"),
        (r"\(a + \frac{1}{2}\) it is", r"a + \frac{1}{2}"),
        ("$a$ then 5 apples", "5"),
        ("it costs $5", "5"),
        ("x+1", "x+1"),
        ("2x + 1", "2x + 1"),
        (r"\frac{3}{4}", r"\frac{3}{4}"),
        ("one\ntwo", None),
        ("", ""),
        ("$" * 50_000, None),
        ("\\(" * 50_000, None),
    ],
)
def test_what_an_unmarked_text_ends_on(text, formula):
    assert extract_formula(text) == formula


HOSTILE = [
    "9^{9^{9^{9^9}}}",
    "9!!!!!!!!!!!!!!!!",
    "(" * 400,
    "(" * 1900,
    r"\frac{" * 900,
    r"\binom{10^{9}}{10^{8}}",
    "__import__('os').system('true')",
    "\x00\ud800\u202e",
]


@pytest.mark.slow
@pytest.mark.needs("math_verify")
@pytest.mark.fault("S10")
def test_hostile_mathematics_earns_0_and_leaves_the_reward_at_work():
    reward = Math(MathConfig(timeout_s=1.5))
    assert rewards(reward, [(f"\\boxed{{{text}}}", r"\sqrt{2}") for text in HOSTILE]) == [
        0.0
    ] * len(HOSTILE)
    assert rewards(reward, ALGEBRA_RIGHT[:2]) == [1.0, 1.0]


def test_an_answer_that_takes_too_long_earns_0_and_a_broken_worker_fails_the_attempt(monkeypatch):
    slow, broken = Math(MathConfig(symbolic="never")), Math(MathConfig(symbolic="never"))
    slow._workers = RewardWorkers("math:factorial", cpu_s=0.05)
    monkeypatch.setattr(
        slow._workers, "call", lambda answer, gold: RewardWorkers.call(slow._workers, 10**7)
    )
    broken._workers = RewardWorkers("no_such_module:equal", cpu_s=0.05)
    assert rewards(slow, [(r"\boxed{x}", "y")]) == [0.0]
    (outcome,) = outcomes(broken, [(r"\boxed{x}", "y")])
    assert isinstance(outcome, Failed)
    assert "did not start" in outcome.detail


def test_truncation_and_a_task_without_answer():
    reward = Math(MathConfig(symbolic="never"))
    (cut,) = asyncio.run(reward.score([answered(task("5"), "5", Truncated(None))], task("5")))
    assert cut == Truncated(0.0, {"math": 0.0})
    (outcome,) = outcomes(reward, [("5", None)])
    assert "task 't/0' has no answer" in outcome.detail


def test_the_probe_knows_the_packages_name():
    assert (importlib.util.find_spec(module.PACKAGE) is not None) == (
        Math(MathConfig())._workers is not None
    )
