"""Runs a command as on a kernel that has no pidfds, such as Linux 4.18.

    python tests/support/older_kernel.py COMMAND [ARGUMENTS]

A filter of system calls (man 2 seccomp) answers pidfd_open and pidfd_send_signal with ENOSYS, as a kernel
does that does not know them. Whatever the command starts has the filter too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434
"""The numbers of the system calls, which are the same on every architecture."""
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    """The kernel's sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _without(*calls: int) -> list[tuple[int, int, int, int]]:
    """The instructions of a filter that knows all system calls but these: code, jumps if true and if false,
    and operand (linux/filter.h). The number of the call stands first in what the filter is given."""
    jumps = [(_JUMP_IF_EQUAL, len(calls) - i, 0, number) for i, number in enumerate(calls)]
    return [(_LOAD_WORD, 0, 0, 0), *jumps, (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _FAIL | errno.ENOSYS)]


def main() -> None:
    """Install the filter, and become the command."""
    instructions = b"".join(struct.pack("=HBBI", *one) for one in _without(_PIDFD_OPEN, _PIDFD_SEND_SIGNAL))
    program = _Program(len(instructions) // 8, instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
