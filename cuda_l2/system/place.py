"""Where an archive is: a file, or a database on a PostgreSQL server."""

import os
import re
from pathlib import Path
from typing import TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from cuda_l2.system import paths
from cuda_l2.system.errors import UserError
from cuda_l2.system.values import short

_URL = re.compile(r"([a-z]+):/+")
SCHEMES = "postgresql", "postgres"
HIDDEN = "***"
"""Takes the place of a password in messages."""


class Server:
    """A database on a PostgreSQL server, by its URL. Printed without the password and without the URL's options."""

    def __init__(self, url: str, /) -> None:
        """ValueError where the text is no URL. Whether it can be one of an archive `options` says."""
        found = _URL.match(url)
        if not found:
            raise ValueError("not a URL")
        rest = url[found.end() :]  # a pathlib.Path has one slash alone
        try:
            self._parts = urlsplit(f"{found[1]}://{rest}")
            self._port = str(self._parts.port or "")
            readable = found[1] in SCHEMES and bool(self._parts.path.strip("/"))
        except ValueError:  # a port that is no number, an open bracket
            readable = False
        if not readable:  # what of it may be a password nobody knows
            self._parts, self._port = urlsplit(f"{found[1]}://..."), ""
        self._readable = readable

    def options(self) -> dict[str, str]:
        """What libpq is asked for. What the URL leaves out libpq takes from its environment and ~/.pgpass.

        UserError where the URL cannot name a PostgreSQL database.
        """
        if not self._readable:
            raise UserError(f"an archive is a file, or postgresql://USER@HOST:PORT/DATABASE, not {self}")
        parts = self._parts
        given = {
            "host": parts.hostname,
            "port": self._port,
            "user": parts.username,
            "password": parts.password,
            "dbname": parts.path.strip("/"),
        }
        return {name: unquote(value) for name, value in given.items() if value} | dict(parse_qsl(parts.query))

    def without_password(self, text: str) -> str:
        """A message of a library without this URL's password."""
        secrets = {self.options().get("password", ""), self._parts.password or ""} - {""}
        for secret in secrets:
            text = text.replace(secret, HIDDEN)
        return text

    def exists(self) -> bool:
        """True: whether the database is there turns out when it is opened."""
        return True

    def __str__(self) -> str:
        host = self._parts.netloc.rpartition("@")[2]
        user = f"{self._parts.username}@" if self._parts.username else ""
        return f"{self._parts.scheme}://{user}{host}{self._parts.path}"

    def __repr__(self) -> str:
        return f"Server({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Server) and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(self._parts)


Place: TypeAlias = Server | Path
"""Server first: a command's option is a path where it is no URL."""


def place_of(given: Place | str | os.PathLike[str]) -> Place:
    """A place as a caller gives it: a path, or the URL of a PostgreSQL database."""
    if isinstance(given, Server):
        return given
    text = os.fspath(given)
    named = text.startswith(tuple(f"{scheme}:/" for scheme in SCHEMES)) or "://" in text
    return Server(text) if named else Path(text)


def is_there(place: Place) -> bool:
    """Whether there is an archive, or a file. UserError where that cannot be found out: a folder without access."""
    try:
        return place.exists()
    except OSError as error:
        raise UserError(f"cannot read {short(str(place))}: {error.strerror or error}") from None


def require_folder(place: Place) -> None:
    """UserError where an archive's file has no folder to lie in; the usual archive's is made with it."""
    if isinstance(place, Path) and place != paths.default_archive() and not is_there(place.parent):
        raise UserError(f"there is no folder {place.parent}; make it, or choose another with --archive")


def folder_of(place: Place) -> Path:
    """The folder of the files that go with an archive, as winners' sources: beside a file, for a server at home."""
    return place.resolve().parent if isinstance(place, Path) else paths.data_dir()


def file_of(place: Place) -> Path | None:
    """The archive's file; None for a server's."""
    return place if isinstance(place, Path) else None
