"""A PostgreSQL server for tests and simulations: a folder of its own, loopback alone, a password, gone at the end.

python examples/postgres_server.py     # prints a URL and runs until Ctrl-C
"""

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

import psycopg
from psycopg import sql

USER = "cuda_l2_tests"
FOLDERS = "/usr/lib/postgresql"
"""Where Debian's packages have a folder a version."""
UNPRIVILEGED = ("postgres", "nobody")
"""Users as whom root starts the server, which refuses to run as root."""


def programs() -> Path | None:
    """The folder of `initdb` and `postgres`; None where PostgreSQL is not installed."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path(FOLDERS).glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "postgres").exists()), None)


def missing() -> str:
    """Why no server can be started here; empty where one can."""
    if programs() is None:
        return "PostgreSQL is not installed: apt install postgresql"
    return "" if os.geteuid() or _account() else f"root needs a user to start it as: {' or '.join(UNPRIVILEGED)}"


class PostgresServer:
    """A server with one user and one database. `url` has its password. A context manager."""

    def __init__(self, connections: int = 100) -> None:
        folder = programs()
        assert folder is not None
        self._programs, self._account = folder, None if os.geteuid() else _account()
        self.password = secrets.token_hex(8)
        self._folder = Path(tempfile.mkdtemp(prefix="cuda-l2-postgres-"))
        self._process: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        (self._folder / "password").write_text(self.password)
        if self._account:
            os.chown(self._folder, self._account.pw_uid, self._account.pw_gid)
            os.chown(self._folder / "password", self._account.pw_uid, self._account.pw_gid)
        words = ["--pgdata=data", f"--username={USER}", "--pwfile=password", "--auth=scram-sha-256", "--no-sync"]
        self._run("initdb", *words, "--encoding=UTF8", "--no-locale")
        settings = {
            **{"listen_addresses": "'127.0.0.1'", "port": self.port, "unix_socket_directories": "''"},
            **{"max_connections": connections, "shared_buffers": "'64MB'", "fsync": "off"},  # a kill loses nothing
        }
        with (self._folder / "data" / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = {value}\n" for name, value in settings.items())
        self.start()

    def url(self, password: str = "", database: str = "postgres") -> str:
        return f"postgresql://{USER}:{password or self.password}@127.0.0.1:{self.port}/{database}"

    def make_database(self, name: str) -> str:
        """The URL of a new, empty database."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.url(database=name)

    def start(self) -> None:
        """Start the server and wait until it answers."""
        words = [self._programs / "postgres", "-D", "data"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log, **self._as_account())
        while not self._answers():
            if self._process.poll() is not None:
                raise RuntimeError((self._folder / "log").read_text())
            time.sleep(0.05)

    def kill(self) -> None:
        """End the server and its processes at once, as a crash does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait()

    def cpu_s(self) -> float:
        """Processor time of the server's processes so far, those that have ended included, in seconds."""
        assert self._process is not None
        found, pid = 0.0, str(self._process.pid)
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if pid in (folder.name, fields[1]):
                    found += 1e-9 * int((folder / "schedstat").read_text().split()[0])
                if folder.name == pid:  # of those that ended; in ticks, which short turns do not meet
                    found += sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")
        return found

    def _answers(self) -> bool:
        words = [self._programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(words, check=False).returncode == 0

    def _run(self, program: str, *words: str) -> None:
        command = [self._programs / program, *words]
        done = subprocess.run(command, check=False, capture_output=True, text=True, **self._as_account())
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stdout}{done.stderr}")

    def _as_account(self) -> dict[str, object]:
        mine = {"cwd": self._folder}
        account = self._account
        return mine | ({"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []} if account else {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)  # fast shutdown
            self._process.wait()
        shutil.rmtree(self._folder)


def _account() -> pwd.struct_passwd | None:
    for name in UNPRIVILEGED:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    return None


if __name__ == "__main__":
    with PostgresServer() as server:
        print(server.url(), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
