"""The filter of system calls, interpreted by hand for chosen calls, and the rules of Landlock."""

import os
import struct

import pytest

from pacs_trl.verification import confinement
from pacs_trl.verification.confinement import (
    ALLOW,
    AND,
    AT_LEAST,
    AUDIT_NAMES,
    EQUAL,
    KILL,
    LOAD,
    NOT_IMPLEMENTED,
    NOT_PERMITTED,
    RETURN,
    Rule,
    assemble,
    rules_for,
)


PID = 4711
THREAD = 0x3D0F00  # what the C library passes to clone for a thread


def interpret(program, machine, number, *arguments):
    """What the kernel makes of a filter: the action for one call."""
    padded = [argument & (1 << 64) - 1 for argument in (*arguments, *[0] * (6 - len(arguments)))]
    data = struct.pack("=IIQ6Q", number & 0xFFFFFFFF, AUDIT_NAMES.get(machine, machine), 0, *padded)
    place, accumulator = 0, 0
    while True:
        code, if_true, if_false, constant = program[place]
        assert 0 <= if_true < 256 and 0 <= if_false < 256
        place += 1
        if code == LOAD:
            accumulator = struct.unpack_from("=I", data, constant)[0]
        elif code == AND:
            accumulator &= constant
        elif code == RETURN:
            return constant
        else:
            place += if_true if {EQUAL: accumulator == constant, AT_LEAST: accumulator >= constant}[code] else if_false


def filter_for(machine="x86_64", may_open_for_writing=True):
    return assemble(rules_for(machine, PID, may_open_for_writing=may_open_for_writing), machine)


def test_first_rule_that_fits():
    program = assemble(
        [Rule(7, NOT_IMPLEMENTED, ((1, 0xF0, 0x10),)), Rule(7), Rule(8, ALLOW, ((0, 1 << 40, 0), (2, 1, 1)))], "x86_64"
    )
    assert interpret(program, "x86_64", 7, 0, 0x1F) == NOT_IMPLEMENTED
    assert interpret(program, "x86_64", 7, 0, 0x2F) == ALLOW
    assert interpret(program, "x86_64", 8, 1 << 39, 0, 3) == ALLOW
    assert interpret(program, "x86_64", 8, 1 << 40, 0, 3) == NOT_PERMITTED  # a bit of the upper half
    assert interpret(program, "x86_64", 8, 0, 0, 2) == NOT_PERMITTED  # the second condition
    assert interpret(program, "x86_64", 9) == NOT_PERMITTED


@pytest.mark.parametrize(
    ("name", "numbers", "arguments", "action"),
    [
        ("read", (0, 63), (), ALLOW),
        ("mmap, also executable", (9, 222), (0, 4096, 7), ALLOW),
        ("exit_group", (231, 94), (), ALLOW),
        ("socket", (41, 198), (), NOT_PERMITTED),
        ("connect", (42, 203), (), NOT_PERMITTED),
        ("fork", (57, None), (), NOT_PERMITTED),
        ("vfork", (58, None), (), NOT_PERMITTED),
        ("execve", (59, 221), (), NOT_PERMITTED),
        ("execveat", (322, 281), (), NOT_PERMITTED),
        ("clone of a thread", (56, 220), (THREAD,), ALLOW),
        ("clone of a process", (56, 220), (17,), NOT_PERMITTED),
        ("clone of a process that shares memory", (56, 220), (0x100 | 17,), NOT_PERMITTED),
        ("clone of a thread in a new namespace", (56, 220), (THREAD | 0x10000000,), NOT_PERMITTED),
        ("clone3", (435, 435), (), NOT_IMPLEMENTED),
        ("ptrace", (101, 117), (), NOT_PERMITTED),
        ("process_vm_readv", (310, 270), (), NOT_PERMITTED),
        ("pidfd_open", (434, 434), (), NOT_PERMITTED),
        ("pidfd_getfd", (438, 438), (), NOT_PERMITTED),
        ("io_uring_setup", (425, 425), (), NOT_PERMITTED),
        ("mount", (165, 40), (), NOT_PERMITTED),
        ("unshare", (272, 97), (), NOT_PERMITTED),
        ("bpf", (321, 280), (), NOT_PERMITTED),
        ("finit_module", (313, 273), (), NOT_PERMITTED),
        ("keyctl", (250, 219), (), NOT_PERMITTED),
        ("prctl", (157, 167), (), NOT_PERMITTED),
        ("memfd_create", (319, 279), (), NOT_PERMITTED),
        ("kill oneself", (62, 129), (PID, 9), ALLOW),
        ("kill another", (62, 129), (PID + 1, 0), NOT_PERMITTED),
        ("kill a group", (62, 129), (-PID, 9), NOT_PERMITTED),
        ("kill everybody", (62, 129), (-1, 9), NOT_PERMITTED),
        ("tgkill oneself", (234, 131), (PID, PID, 6), ALLOW),
        ("tgkill another", (234, 131), (1, 1, 6), NOT_PERMITTED),
        ("tkill", (200, 130), (PID, 6), NOT_PERMITTED),
        ("prlimit64 that reads", (302, 261), (0, 7, 0, 4096), ALLOW),
        ("prlimit64 that sets", (302, 261), (0, 7, 1 << 40, 0), NOT_PERMITTED),
        ("prlimit64 of another", (302, 261), (1, 7, 0, 4096), NOT_PERMITTED),
        ("fcntl that duplicates", (72, 25), (0, 1030), ALLOW),
        ("fcntl that sets an owner", (72, 25), (0, 8), NOT_PERMITTED),
        ("ioctl of a terminal's settings", (16, 29), (0, 0x5401), ALLOW),
        ("ioctl that types into a terminal", (16, 29), (0, 0x5412), NOT_PERMITTED),
        ("openat2", (437, 437), (), NOT_PERMITTED),
        ("mkdirat", (258, 34), (), NOT_PERMITTED),
        ("number -1", (-1, -1), (), KILL),
        ("x32", (0x40000000, 0x40000000), (), KILL),
    ],
)
def test_calls(name, numbers, arguments, action):
    for machine, number in zip(AUDIT_NAMES, numbers, strict=True):
        if number is not None:
            assert interpret(filter_for(machine), machine, number, *arguments) == action, machine


def test_other_architectures_are_killed():
    assert interpret(filter_for(), 0x40000003, 1) == KILL  # 32-bit programs, whose numbers mean something else
    assert interpret(filter_for(), "aarch64", 63) == KILL
    assert interpret(filter_for("aarch64"), "x86_64", 0) == KILL


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_TMPFILE | os.O_RDWR])
def test_without_landlock_nothing_is_opened_for_writing(flags):
    alone = filter_for(may_open_for_writing=False)
    for program, action in ((alone, NOT_PERMITTED), (filter_for(), ALLOW)):
        assert interpret(program, "x86_64", 257, 0, 0, flags | os.O_CLOEXEC) == action
        assert interpret(program, "x86_64", 2, 0, flags) == action
    assert interpret(alone, "x86_64", 257, 0, 0, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY) == ALLOW


def test_numbers_are_those_of_the_kernel_headers():
    """Where a machine has them; names that a header has not are no test."""
    header = "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"
    if not os.path.isfile(header):
        pytest.skip(f"no {header}")
    with open(header) as file:
        known = {line.split()[1]: int(line.split()[2]) for line in file if line.startswith("#define __NR_")}
    tables = (confinement._ALLOWED, confinement._OTHERS)
    for name, number, _ in (entry.split() for table in tables for entry in table.split(",")):
        assert number == "-" or known[f"__NR_{name}"] == int(number)


def test_what_may_be_read():
    places = confinement.readable_places()
    assert not [place for place in places if "packages" in place or place in ("/", "/home", "/tmp", "/etc")]
    assert any(place.endswith("/json") for place in places)
    library = os.path.dirname(os.__file__)
    assert not [place for place in places if f"{library}/".startswith(f"{place}/")]
