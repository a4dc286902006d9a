"""Results within the task's tolerance on the usual values of five seeds, as CUDA-L1 asks; errors are kept."""

from cuda_l2.verify.tasks._base import TaskCheck, TaskSession, require_right

SEEDS = 5


class Seeds(TaskCheck):
    name = "five seeds"
    order = 10

    def run(self, session: TaskSession) -> None:
        rms, largest = 0.0, 0.0
        for seed in range(SEEDS):
            case = session.cases.drawn(f"seed {seed}")
            found = session.launch(case)
            require_right(case, found, f"on {session.cases.usual}")
            for output, limit in zip(case.task.outputs, case.bounds, strict=True):
                rms_error, max_error = limit.errors(found[output.name])
                rms, largest = max(rms, rms_error), max(largest, max_error)
        session.rms_error, session.max_error = rms, largest


CHECK = Seeds()
