"""cuda-l2 replay: compare proposers on recorded trials, without building or timing anything."""
def command() -> None:
    """TODO"""
