"""A process that says two lines, and between them that it waits."""

import json
import sys

if __name__ == "__main__":
    for _ in sys.stdin:
        for message in ({"said": "a"}, {"waits": True}, {"said": "b"}, {"answer": 1}):
            print(json.dumps(message), flush=True)
