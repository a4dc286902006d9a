"""Texts and speed of `transformers serve` with and without accelerated models: the same requests by turns.

    python examples/serve/compare.py MODEL
    python examples/serve/compare.py MODEL --options "" --options=--continuous-batching --options=--compile

For each set of the server's options a plain server and an accelerated one (serve.py) run on this machine. Each answers
every prompt twice to warm up. In every round all servers answer one prompt, one after another in random order. Requests
are greedy, one at a time. Tokens a second are of whole requests, with the time that the prompt takes.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from cuda_l2.measure.sampler import Samples
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import markdown_table

PROMPTS = (
    "What is the capital of France? Answer in one sentence.",
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five animals that live in the sea, and one fact about each of them.",
)
PAUSE_S = 0.2
LINES = 60
"""Number of last lines that are shown of the output of a server that fails."""
LISTENS = re.compile(r"running on (http://127\.0\.0\.1:\d+) ")
"""What uvicorn logs once it has its port."""
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the servers are on this machine
Arm = tuple[str, bool]
"""A server's options, and whether its models are accelerated."""
Texts = dict[Arm, dict[str, set[str]]]
"""All texts that a server answered to each prompt."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", help="a folder or a name, as for `transformers serve`")
    options.add_argument("--options", action="append", help="of the servers, as one word; may be given again")
    options.add_argument("--rows", default="1-256", help="as for serve.py")
    options.add_argument("--tokens", type=int, default=128, help="of an answer, at most; default %(default)s")
    options.add_argument("--rounds", type=int, default=3, help="for each of the prompts; default %(default)s")
    options.add_argument("--json", type=Path, help="write all texts and times into a file")
    given = options.parse_args()
    arms = [(text, served) for text in given.options or [""] for served in (False, True)]
    try:
        with tempfile.TemporaryDirectory() as folder, running(given.model, arms, given.rows, Path(folder)) as servers:
            samples, texts = compare(servers, given.tokens, given.rounds)
    except UserError as error:
        sys.exit(f"compare.py: {error}")
    if given.json:
        lines = [(*arm, samples.of(arm), {key: sorted(found) for key, found in texts[arm].items()}) for arm in arms]
        given.json.write_text(json.dumps(lines, indent=1) + "\n")
    print("\n".join(table(samples, texts)))


class Server:
    """A server in a process of its own, on a port of the system's choice; its output goes into a file of the folder."""

    address = ""
    """Where it listens, from `wait` on."""

    def __init__(self, model: str, arm: Arm, rows: str, folder: Path) -> None:
        options, served = arm
        self.model = model
        own = ["--rows", rows] if served else ["--plain"]
        # a port that is free now may be another's by the time the server binds it: it binds any, and logs which
        where = ["--log-level", "info", *shlex.split(options), "--host", "127.0.0.1", "--port", "0"]
        # threads of a server that waits for its turn would spin on the cores of the one that answers
        env = {"OMP_WAIT_POLICY": "passive", "HF_HUB_DISABLE_UPDATE_CHECK": "1", "HF_HUB_OFFLINE": "1", **os.environ}
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as output:
            self.log = Path(output.name)
            program = [sys.executable, str(Path(__file__).with_name("serve.py")), *own, model, *where]
            self.process = subprocess.Popen(program, stdout=output, stderr=output, env=env)

    def wait(self) -> None:
        """Return when it answers; UserError where it has ended."""
        while self.process.poll() is None:
            if listens := LISTENS.search(self.log.read_text()):
                self.address = listens[1]
                with contextlib.suppress(OSError):
                    return DIRECT.open(f"{self.address}/health").close()
            time.sleep(PAUSE_S)
        raise self.failed(f"ended with status {self.process.returncode}")

    def answer(self, prompt: str, tokens: int) -> tuple[str, float]:
        """The text, and the seconds that each of its tokens took. UserError where there is none."""
        asked = {"model": self.model, "messages": [{"role": "user", "content": prompt}]}
        body = json.dumps({**asked, "temperature": 0, "max_tokens": tokens}).encode()
        url, kind = f"{self.address}/v1/chat/completions", {"Content-Type": "application/json"}
        began = time.perf_counter()
        try:
            with DIRECT.open(urllib.request.Request(url, body, kind)) as reply:
                said = json.load(reply)
            seconds = time.perf_counter() - began
            return said["choices"][0]["message"]["content"], seconds / said["usage"]["completion_tokens"]
        except (OSError, ValueError, KeyError, ZeroDivisionError) as error:
            raise self.failed(f"did not answer ({error!r})") from None

    def failed(self, what: str) -> UserError:
        return UserError("\n".join([f"a server {what}:", *self.log.read_text().splitlines()[-LINES:]]))


@contextlib.contextmanager
def running(model: str, arms: Sequence[Arm], rows: str, folder: Path) -> Iterator[dict[Arm, Server]]:
    """The servers of all arms, ready. One that is accelerated starts ahead of the others: it tunes alone on the GPU."""
    servers: dict[Arm, Server] = {}
    try:
        for arm in sorted(arms, key=lambda arm: not arm[1]):
            servers[arm] = Server(model, arm, rows, folder)
            if len(servers) == 1:
                servers[arm].wait()
        for server in servers.values():
            server.wait()
        yield {arm: servers[arm] for arm in arms}
    finally:
        for server in servers.values():
            server.process.kill()
        for server in servers.values():
            server.process.wait()


def compare(servers: dict[Arm, Server], tokens: int, rounds: int, seed: int = 0) -> tuple[Samples[Arm], Texts]:
    """Seconds a token of each server in every round, and all texts. rounds: for each prompt."""

    def warm_up(server: Server) -> None:
        for prompt in PROMPTS * 2:
            server.answer(prompt, tokens)

    with ThreadPoolExecutor(len(servers)) as threads:  # what compiles does so at once
        list(threads.map(warm_up, servers.values()))
    samples: Samples[Arm] = Samples()
    texts: Texts = {arm: defaultdict(set) for arm in servers}
    arms, rng = [*servers], np.random.default_rng(seed)
    for number, prompt in enumerate(PROMPTS * rounds):
        for arm in (arms[index] for index in rng.permutation(len(arms))):
            text, seconds = servers[arm].answer(prompt, tokens)
            samples.add(arm, number, seconds)
            texts[arm][prompt].add(text)
    return samples, texts


def table(samples: Samples[Arm], texts: Texts) -> list[str]:
    """A row for each set of options. Texts count as the same where all answers to a prompt are."""

    def same(one: Arm, other: Arm) -> str:
        found = [texts[one][prompt] | texts[other][prompt] for prompt in PROMPTS]
        return f"{sum(len(answers) == 1 for answers in found)} of {len(found)}"

    rows = []
    for options in dict.fromkeys(options for options, _ in texts):
        plain, ours = (options, False), (options, True)
        ratio = samples.ratio(plain, ours)
        speeds = [f"{1 / samples.median(arm):.1f}" for arm in (plain, ours)]
        interval = f"{ratio.estimate:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        rows.append((options or "none", *speeds, interval, same(plain, ours), same(next(iter(texts)), plain)))
    head = ("options", "plain, tokens/s", "accelerated, tokens/s", "ratio [95 %]", "same texts", "plain as in row 1")
    return markdown_table(head, rows)


if __name__ == "__main__":
    main()
