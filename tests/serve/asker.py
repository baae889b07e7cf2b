"""One HTTP request, as a script that can run anywhere: asked on stdin, answered on stdout as it comes.

The first line is the status, 0 where there was none; then comes the body, or why there is none.
"""

import http.client
import json
import sys
from urllib.parse import urlsplit


def main() -> None:
    asked = json.load(sys.stdin)
    where = urlsplit(asked["url"])
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=asked["timeout_s"])
    headers = {"Content-Type": "application/json"}
    if asked["key"] is not None:
        headers["Authorization"] = f"Bearer {asked['key']}"
    raw = None if asked["body"] is None else json.dumps(asked["body"]).encode()
    try:
        connection.request("GET" if raw is None else "POST", asked["path"], raw, headers)
        response = connection.getresponse()
        _say(f"{response.status}\n".encode())
        while line := response.readline():
            _say(line)
    except (OSError, http.client.HTTPException) as error:
        _say(f"0\n{error!r}\n".encode())


def _say(raw: bytes) -> None:
    sys.stdout.buffer.write(raw)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
