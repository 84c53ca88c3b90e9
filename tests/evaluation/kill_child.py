"""Child process of test_kill.py."""

from types import SimpleNamespace

from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.evaluation.run import evaluate
from pacs_trl.verification import Outcome, Verifier


class NoGrading:
    """Calls everything wrong without starting a process: the counts of a run that dies are never seen."""

    protocol, cpu_seconds, grade_truncated = "authors", 0.5, False

    def unreadable_golds(self, solutions):
        return []

    def grade_detailed(self, completions, solutions, truncated):
        return [SimpleNamespace(outcome=Outcome.WRONG) for _ in completions]


def evaluate_and_be_killed(arguments):
    evaluate(EvaluationArguments(**arguments), NoGrading(), progress=False)


def evaluate_to_the_end(arguments):
    with Verifier(num_workers=1) as verifier:
        evaluate(EvaluationArguments(**arguments), verifier, progress=False)
