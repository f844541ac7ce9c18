"""`greenroom.trainer`: new weights for all replicas of a model, from the program that trains it.

    from greenroom.trainer import Trainer

    trainer = Trainer(["http://127.0.0.1:8001", "http://127.0.0.1:8002"], api_key="gr-…")
    report = trainer.update("org/chat-7b", revision="step-1200")
    if not report.ok:
        print(report)

Needs only the standard library, so that any training program can import it.
"""

from greenroom.trainer.replica import Answer, Outcome, ReplicaAway, ReplicaError, ReplicaStatus, Report, Result, Sign
from greenroom.trainer.sync import Patience
from greenroom.trainer.trainer import Trainer

__all__ = [
    "Answer",
    "Outcome",
    "Patience",
    "ReplicaAway",
    "ReplicaError",
    "ReplicaStatus",
    "Report",
    "Result",
    "Sign",
    "Trainer",
]
