"""A tool for TRL's tool calls: the model may run a program in the sandbox before it answers."""

from . import shared_code_verifier


# Characters of an output or of messages that go back into the conversation.
MAX_REPLY = 2000


def run_python(code: str, input: str = "") -> str:
    """
    Run a Python program and return what it prints.

    Args:
        code: The whole program.
        input: What it reads from standard input.

    Returns:
        What it prints.
    """
    (execution,) = shared_code_verifier().run([code], [input])
    if execution.outcome is not None:  # an exception, so that it counts among `tools/failure_frequency`
        raise RuntimeError(f"{execution.error}: {execution.messages[-MAX_REPLY:].strip()}")
    return execution.output[:MAX_REPLY]
