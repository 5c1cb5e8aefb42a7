"""Moto's S3 over HTTP on a port of the loopback interface: `python s3_server.py PORT`."""

from __future__ import annotations

import sys

from moto.server import main

# Moto looks whether a key exists and then stores it, without a lock. Threads that are not interrupted in between make
# its conditional PUT as atomic as S3's.
sys.setswitchinterval(0.05)
main(["-H", "127.0.0.1", "-p", sys.argv[1]])
