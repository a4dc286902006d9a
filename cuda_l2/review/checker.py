"""Opens the checker that a user's settings name."""

from cuda_l2.llm.settings import ModelSettings
from cuda_l2.review._base import Checker
from cuda_l2.review.settings import ReviewSettings
from cuda_l2.system.place import Place


def open_checker(review: ReviewSettings, settings: ModelSettings, archive: Place) -> Checker | None:
    """The checker that the settings name, None where they name none.

    archive: an existing archive, which keeps the exchanges. UserError where the checker cannot be used.
    """
    if not review.checker:
        return None
    from cuda_l2.review.model_checker import ModelChecker  # noqa: PLC0415 - parts of it are optional

    return ModelChecker(review, settings, archive)
