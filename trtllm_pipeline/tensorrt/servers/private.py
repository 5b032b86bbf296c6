"""Runs a program whose files only its user can read.

    python -I -S private.py COMMAND...

Triton's Python models exchange prompts and answers through files in /dev/shm. The library that creates them sets their
mode to 0644, whatever the umask. A filter turns that one call into a no-op, in this process and all its descendants. If
the kernel does not allow that, a line on stderr reports it, and the program runs all the same.

Imports no modules of the package: starting has to be cheap.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _SPEC_ALLOW = 1, 4
_NUMBERS = {"x86_64": (0xC000003E, 91, 317), "aarch64": (0xC00000B7, 52, 277)}
"""AUDIT_ARCH, and the system calls fchmod and seccomp."""
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_DO_NOTHING, _ALLOW = 0x00050000, 0x7FFF0000
_MODE = 0o644


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def keep_modes() -> bool:
    """Turn fchmod(file, 0644) into a no-op, in this process and all its descendants. Returns True on success."""
    libc = ctypes.CDLL(None)
    architecture, fchmod, seccomp = _NUMBERS.get(os.uname().machine, (0, 0, 0))
    instructions = (  # code, where to continue when equal, when not, value; the data are of struct seccomp_data
        (_LOAD, 0, 0, 4), (_EQUAL, 0, 5, architecture),
        (_LOAD, 0, 0, 0), (_EQUAL, 0, 3, fchmod),
        (_LOAD, 0, 0, 24), (_EQUAL, 0, 1, _MODE),
        (_RETURN, 0, 0, _DO_NOTHING),
        (_RETURN, 0, 0, _ALLOW),
    )  # fmt: skip
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in instructions))
    program = _Filter(len(instructions), ctypes.addressof(code))
    if not seccomp:
        return False

    def installed() -> bool:
        # Without the flag, older kernels slow down programs that have a filter.
        return bool(libc.syscall(seccomp, _SET_MODE_FILTER, _SPEC_ALLOW, ctypes.byref(program)) == 0)

    # Privileged processes keep the right to gain privileges. All others have to give it up.
    return installed() or (libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and installed())


def main(command: list[str]) -> None:
    """Replace this process with `command`."""
    os.umask(0o077)
    if not keep_modes():
        print("this kernel cannot keep shared memory private: other users of this machine can read it", file=sys.stderr)  # noqa: T201
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
