"""The process of a RemoteEnd."""

import json
import sys
from multiprocessing.connection import Connection

from tests.transport.ends import open_end, serve

if __name__ == "__main__":
    descriptor, subject, lie, options = sys.argv[1:]
    serve(Connection(int(descriptor)), open_end(subject, lie or None, json.loads(options)))
