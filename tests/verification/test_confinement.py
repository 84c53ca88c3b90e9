"""The filter of system calls, interpreted by hand for chosen calls, and the rules of Landlock."""

import os
import struct
from pathlib import Path

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


CALLS = (Path(__file__).parents[1] / "data" / "system_calls.txt").read_text().splitlines()[1:]


@pytest.mark.parametrize("call", CALLS)
def test_calls(call):
    _, numbers, arguments, action = call.split(" | ")
    for machine, number in zip(AUDIT_NAMES, numbers.split(), strict=True):
        if number != "-":
            values = [int(argument, 0) for argument in arguments.split()]
            assert interpret(filter_for(machine), machine, int(number), *values) == getattr(confinement, action), (
                machine
            )


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
