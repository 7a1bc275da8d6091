"""`python -m tests.support.echoing exit CODE | sleep | fail`: a small program for the tests of `ForkServer`."""

from __future__ import annotations

import os
import sys
import time

if __name__ == "__main__":
    what = sys.argv[1]
    if what == "exit":
        for line in sys.stdin:
            print(line.strip(), os.environ.get("MINE", ""), flush=True)
            break
        sys.exit(int(sys.argv[2]))
    if what == "sleep":
        print("asleep", flush=True)
        time.sleep(600)
    print(1 // 0)
