"""cuda-l2 exchanges: questions to language models, their answers and costs."""

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from cuda_l2 import tasks
from cuda_l2.commands._options import tell
from cuda_l2.system.errors import UserError
from cuda_l2.system.place import Place
from cuda_l2.system.text import plain

if TYPE_CHECKING:
    from cuda_l2.archive import Archive
    from cuda_l2.llm.exchanges import Exchange


def command(
    shape: str | None = None,
    /,
    *,
    archive: Place | None = None,
    count: int = 20,
    read: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """List the exchanges with language models that the archive keeps, the latest last.

    Args:
        shape: Only about this shape or other task.
        archive: File that keeps the trials and exchanges, or postgresql://USER@HOST/DATABASE.
        count: Largest number of exchanges listed.
        read: Print one exchange whole, prompt and answer: its name in the list.
        json: Print the exchanges as JSON, one a line, prompts and answers included.
    """
    from cuda_l2.archive import Archive
    from cuda_l2.llm.exchanges import ExchangeLog
    from cuda_l2.records import to_json
    from cuda_l2.system import paths

    task = str(tasks.identity(shape)) if shape else ""
    path = archive or paths.default_archive()
    if count < 1:
        raise UserError(f"the number of exchanges must be at least 1, not {count}")
    if not path.exists():
        raise UserError(f"there is no archive {path}; a search with a language model makes one, see docs/llm.md")
    with Archive(path) as opened, ExchangeLog(path) as log:
        found = log.exchanges(task=task)
        if read is not None:
            found = [exchange for exchange in found if read in (exchange.key, _name(exchange))]
        if not found:
            raise UserError(f"{path} keeps no such exchange; searches with a language model do, see docs/llm.md")
        if read is not None:
            _print_whole(found[-1])
        elif json:
            print("\n".join(to_json(exchange) for exchange in found[-count:]))
        else:
            _print_table(found[-count:], opened)
            if len(found) > count:
                tell(f"the last {count} of {len(found)}; --count {len(found)} lists all")


def _name(exchange: "Exchange") -> str:
    """A short name: the question's hash and the number of earlier askings."""
    digest, _, number = exchange.key.partition("-")
    return f"{digest[:8]}-{number}"


def _print_whole(exchange: "Exchange") -> None:
    for message in exchange.messages:
        print(plain(f"----- {message.role}\n{message.text}"))
    reply = exchange.reply
    print(plain(f"----- {exchange.model}, {reply.outcome}\n{reply.text or reply.reason}"))


def _print_table(exchanges: list["Exchange"], archive: "Archive") -> None:
    from rich.console import Console
    from rich.table import Table

    from cuda_l2.llm._base import one_line
    from cuda_l2.propose._answer import parse_answer
    from cuda_l2.records import Candidate

    trials = {(str(trial.task), trial.candidate.id): trial for trial in archive.trials()}
    table = Table("exchange", "when", "task", "model", "turn", "tokens", "cost", "design", "what came of it")
    for exchange in exchanges:
        reply = exchange.reply
        became, design = f"{reply.outcome}: {reply.reason}", ""
        reported = reply.prompt_tokens or reply.answer_tokens
        tokens = f"{reply.prompt_tokens}+{reply.answer_tokens}" if reported else ""
        if not reply.reason and exchange.purpose in ("instruct", "segment", "check"):
            became = one_line(reply.text, 120)
        elif not reply.reason:
            answer = parse_answer(reply.text, reply.finish)
            design = answer.design
            trial = trials.get((exchange.task, Candidate(answer.source).id))
            became = f"answer {answer.fault}" if answer.fault else "not judged yet"
            if trial:
                became = f"{trial.status}, {trial.speedup:.3f}x" if trial.speedup else f"{trial.status}: {trial.reason}"
        table.add_row(
            *(_name(exchange), exchange.created[:19], exchange.task, exchange.model, str(exchange.turn)),
            *(tokens or "not told", "" if exchange.cost is None else f"{exchange.cost:.4g}"),
            one_line(design, 120),
            one_line(became, 120),
        )
    Console(markup=False, emoji=False, highlight=False, width=180).print(table)
