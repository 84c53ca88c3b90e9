"""Preloaded by the fork server of tests: a client that is killed while it connects must not end the server, which
would then report exit code 255 for every process."""

import errno
from multiprocessing import reduction


_receive = reduction.recvfds


def recvfds(sock, size):
    try:
        return _receive(sock, size)
    except EOFError as error:
        raise OSError(errno.ECONNABORTED, "The client has ended.") from error  # which the server ignores


reduction.recvfds = recvfds
