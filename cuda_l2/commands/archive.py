"""cuda-l2 archive: copies and checks of archives."""

import sys

from cyclopts import App

from cuda_l2.commands._options import tell
from cuda_l2.system.errors import UserError
from cuda_l2.system.place import Place, is_there, place_of
from cuda_l2.system.text import counted

command = App(name="archive", help="Archives of trials, in files and on PostgreSQL servers: copy one, check one.")


@command.command
def copy(source: str, into: str, /) -> None:
    """Copy all that an archive holds into another: trials, exchanges with models, states of policies.

    What is there already is not added again, so an interrupted copy goes on, and several archives can be put into one.

    Args:
        source: A file, or postgresql://USER@HOST/DATABASE.
        into: The same; it is made where there is none.
    """
    begin, end = _there(source), place_of(into)
    if begin == end:
        raise UserError(f"{begin} cannot be copied into itself")

    from cuda_l2.store._base import StoreFault
    from cuda_l2.store.copying import copy as copy_all
    from cuda_l2.store.opening import open_database

    with open_database(begin, "read") as read, open_database(end, "make") as written:
        try:
            done = copy_all(read, written, lambda so_far: tell(f"{so_far.trials:,} trials read"))
        except StoreFault as fault:
            raise UserError(f"the copy to {end} ended: {fault}; what was copied is kept, start again") from None
    print(
        f"{counted(done.trials, 'trial')}, {done.new_trials:,} of them new; {counted(done.exchanges, 'exchange')},"
        f" {done.new_exchanges:,} of them new; {counted(done.policies, 'policy', 'policies')} that {end} had older or"
        " not at all"
    )


@command.command
def check(archive: str, /) -> None:
    """Read all of an archive: whether its sources have their ids, and its records are whole. Exits with 1 if not.

    Args:
        archive: A file, or postgresql://USER@HOST/DATABASE.
    """
    place = _there(archive)

    from cuda_l2.store._base import SCHEMA_VERSION, StoreFault
    from cuda_l2.store.checking import check as check_all
    from cuda_l2.store.opening import open_database

    with open_database(place, "read") as db:
        try:
            found = check_all(db)
        except StoreFault as fault:
            raise UserError(f"{place} cannot be read: {fault}") from None
    print(
        f"{place}, version {SCHEMA_VERSION}: {counted(found.trials, 'trial')} of"
        f" {counted(found.candidates, 'candidate')}, {counted(found.exchanges, 'exchange')},"
        f" {counted(found.claims, 'claim')}, {found.expired:,} of them expired"
    )
    for line in found.faults:
        print(line)
    print("damaged: copy what can be read with `cuda-l2 archive copy`" if found.faults else "whole")
    if found.faults:
        sys.exit(1)


def _there(given: str) -> Place:
    place = place_of(given)
    if not is_there(place):
        raise UserError(f"there is no archive {place}")
    return place
