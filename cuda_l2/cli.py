"""Starts the command line. Its modules load where Ctrl-C is awaited already."""

import sys

from cuda_l2.system import variables


def main() -> None:
    """Run a command; this process's own settings are made here, before torch loads."""
    variables.clean_process()
    try:
        from cuda_l2.commands._app import run  # noqa: PLC0415

        run()
    except KeyboardInterrupt:
        print("cuda-l2: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
