from pacs_trl.rewards import format_reward, math_reward


def test_math_reward_plain_and_conversational():
    completions = [r"so it is \boxed{\frac{1}{2}}", [{"role": "assistant", "content": "The answer is 0.5"}], "no"]
    assert math_reward(completions, solution=[r"\frac12", "0.5", "3"]) == [1.0, 1.0, 0.0]


def test_format_reward_asks_for_a_box():
    assert format_reward([r"\boxed{1}", "1"]) == [1.0, 0.0]
