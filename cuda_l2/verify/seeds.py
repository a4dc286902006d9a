"""Results within the task's tolerance on the usual values of five seeds, as CUDA-L1 asks; errors are kept."""

from cuda_l2.verify._base import Check, Session, require_right

SEEDS = 5


class Seeds(Check):
    name = "five seeds"
    order = 10
    products = False  # exact match and the precision contract ask more of one

    def run(self, session: Session) -> None:
        rms, largest = 0.0, 0.0
        for seed in range(SEEDS):
            case = session.cases.drawn(f"seed {seed}")
            found = session.launch(case)
            require_right(case, found, f"on {session.cases.usual}")
            rms_error, max_error = case.errors(found)
            rms, largest = max(rms, rms_error), max(largest, max_error)
        session.rms_error, session.max_error = rms, largest


CHECK = Seeds()
