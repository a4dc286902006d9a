"""Results within the task's tolerance for five seeds of weights and of the file's own inputs; errors are kept."""

from cuda_l2.audit._base import ModuleCheck, ModuleSession, require_right

SEEDS = 5


class Seeds(ModuleCheck):
    name = "five seeds"
    order = 10

    def run(self, session: ModuleSession) -> None:
        rms, largest = 0.0, 0.0
        for seed in range(SEEDS):
            case = session.cases.get(f"seed {seed}", weights_seed=seed)
            session.make(case, seed)
            found = session.launch(case)[0]
            require_right(case, found, f"on the file's own inputs, weights by seed {seed}")
            for name, limit in case.bounds.items():
                rms_error, max_error = limit.errors(found[name])
                rms, largest = max(rms, rms_error), max(largest, max_error)
        session.rms_error, session.max_error = rms, largest
        unnamed = session.unnamed(case)
        if unnamed:
            session.notes.append(f"has no weights named {', '.join(unnamed[:6])}: they come from the seed alone")


CHECK = Seeds()
