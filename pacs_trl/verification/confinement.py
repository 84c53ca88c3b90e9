"""Confinement of the process that runs a program, in three independent layers.

`seccomp` allows the system calls that an interpreter needs to compute; all others fail. `landlock` limits the files
that may be opened, and, in newer kernels, TCP, signals, and abstract sockets. Limits cover CPU time, memory, sizes,
open files, and capabilities. No layer needs root or a package, and none can be undone by the process or its children.
"""

import ctypes
import errno
import os
import resource
import struct
from collections.abc import Sequence
from typing import NamedTuple


LAYERS = ("landlock", "seccomp")

_libc = ctypes.CDLL(None, use_errno=True)

# --- seccomp: a filter over the number and the arguments of a system call, in the kernel's classic BPF ---

KILL, ALLOW, NOT_PERMITTED, NOT_IMPLEMENTED = 0x8000_0000, 0x7FFF_0000, 0x0005_0001, 0x0005_0026  # EPERM, ENOSYS
LOAD, EQUAL, AT_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in the kernel's `struct seccomp_data`
X32 = 0x4000_0000  # a bit in the number of a call of the x32 convention

AUDIT_NAMES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
# Allowed with any arguments: name, number on x86_64, on aarch64 (asm-generic); "-" for none.
_ALLOWED = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, lseek 8 62, close 3 57,
close_range 436 436, fstat 5 80, newfstatat 262 79, stat 4 -, lstat 6 -, statx 332 291, access 21 -, faccessat 269 48,
faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents64 217 61, getcwd 79 17, umask 95 166,
ftruncate 77 46, mmap 9 222, munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233, brk 12 214, futex 202 98,
rseq 334 293, set_robust_list 273 99, get_robust_list 274 100, set_tid_address 218 96, sched_yield 24 124,
sched_getaffinity 204 123, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101,
gettimeofday 96 169, time 201 -, getpid 39 172, gettid 186 178, getppid 110 173, getuid 102 174, geteuid 107 175,
getgid 104 176, getegid 108 177, getpgrp 111 -, getpgid 121 155, getsid 124 156, getrandom 318 278, sysinfo 99 179,
uname 63 160, getrusage 98 165, times 100 153, getrlimit 97 163, rt_sigaction 13 134, rt_sigprocmask 14 135,
rt_sigreturn 15 139, rt_sigtimedwait 128 137, sigaltstack 131 132, restart_syscall 219 128, pause 34 -, alarm 37 -,
setitimer 38 103, getitimer 36 102, exit 60 93, exit_group 231 94, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -,
pipe2 293 59, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72
"""
# Allowed with some arguments.
_OTHERS = """
open 2 -, openat 257 56, clone 56 220, clone3 435 435, fcntl 72 25, ioctl 16 29, kill 62 129, tgkill 234 131,
prlimit64 302 261
"""

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_THREAD = 0x100 | 0x800 | 0x1_0000  # CLONE_VM, CLONE_SIGHAND, CLONE_THREAD
_NO_THREAD = 0xFE02_E080  # namespaces, CLONE_PTRACE, CLONE_VFORK, CLONE_PARENT, CLONE_IO
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC: no owner of signals, no leases
_FCNTL = (0, 1, 2, 3, 4, 1030)
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_INT, _LONG = 0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF


class Rule(NamedTuple):
    """Action for a system call if, for each (argument, mask, value), the masked argument equals the value."""

    number: int
    action: int = ALLOW
    conditions: tuple[tuple[int, int, int], ...] = ()


def assemble(rules: Sequence[Rule], machine: str) -> list[tuple[int, int, int, int]]:
    """Return the filter as instructions (code, jump if true, jump if false, constant). The first matching rule
    decides; other calls are refused, and a call of another architecture kills the process."""
    program = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, AUDIT_NAMES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, KILL),
    ]
    for rule in rules:
        block = [(LOAD, NUMBER), (EQUAL, rule.number)]
        for argument, mask, value in rule.conditions:
            for half, shift in ((0, 0), (4, 32)):  # instructions have 32 bits, arguments 64
                if part := mask >> shift & _INT:
                    block += [(LOAD, ARGUMENTS + 8 * argument + half), (AND, part), (EQUAL, value >> shift & part)]
        # An inequality jumps to the end of the block.
        program += [
            (code, 0, len(block) - place if code == EQUAL else 0, constant)
            for place, (code, constant) in enumerate(block)
        ]
        program.append((RETURN, 0, 0, rule.action))
    return [*program, (RETURN, 0, 0, NOT_PERMITTED)]


def rules_for(machine: str, pid: int, *, may_open_for_writing: bool) -> list[Rule]:
    """Return rules that allow what an interpreter needs to compute: signals only to itself (`pid`), and opening files
    for writing only if Landlock restricts them."""
    column = list(AUDIT_NAMES).index(machine)

    def numbers(table: str) -> dict[str, int]:
        entries = (entry.split() for entry in table.split(","))
        return {name: int(number[column]) for name, *number in entries if number[column] != "-"}

    rules = [Rule(number) for number in numbers(_ALLOWED).values()]
    special = numbers(_OTHERS)
    for name, flags in (("open", 1), ("openat", 2)):
        if name in special:
            rules.append(Rule(special[name], ALLOW, () if may_open_for_writing else ((flags, _WRITING, 0),)))
    rules.append(Rule(special["clone"], ALLOW, ((0, _THREAD | _NO_THREAD, _THREAD),)))
    rules.append(Rule(special["clone3"], NOT_IMPLEMENTED))  # its flags are in memory; the C library then calls clone
    rules += [Rule(special["fcntl"], ALLOW, ((1, _INT, command),)) for command in _FCNTL]
    rules += [Rule(special["ioctl"], ALLOW, ((1, _INT, request),)) for request in _IOCTL]
    rules += [Rule(special[name], ALLOW, ((0, _INT, pid),)) for name in ("kill", "tgkill")]
    rules += [Rule(special["prlimit64"], ALLOW, ((0, _INT, who), (2, _LONG, 0))) for who in (0, pid)]  # read, not set
    return rules


def install_filter(program: Sequence[tuple[int, int, int, int]]) -> None:
    """Install a filter on this process, irrevocably."""
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    described = _Program(len(program), ctypes.addressof(buffer))  # the call only gets its address
    prctl(22, 2, ctypes.addressof(described))  # PR_SET_SECCOMP, filter mode


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def prctl(option: int, *arguments: int) -> None:
    """Call prctl(2)."""
    values = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    _check(_libc.prctl(ctypes.c_int(option), *values), f"prctl {option}")


def _check(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


# --- Landlock: files and folders that this process may open ---

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # of every architecture
_WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
# Number of rights in versions 1, 2, ... of Landlock. Unknown rights are an error; omitted ones are not restricted.
_NUM_RIGHTS = (13, 14, 15, 15, 16)


def landlock_version() -> int:
    """Return the kernel's Landlock version. Raises `OSError` if it has none or has it disabled."""
    return _check(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1)), "Landlock")


def landlock_ruleset(readable: Sequence[str]) -> int:
    """Return a descriptor of rules that allow reading `readable` and using /dev/null, and refuse everything else that
    this kernel can: other files, TCP (version 4), device controls (5), signals and abstract sockets to outside (6)."""
    version = landlock_version()
    rights = (1 << _NUM_RIGHTS[min(version, len(_NUM_RIGHTS)) - 1]) - 1
    attributes = struct.pack("=QQQ", rights, 0b11, 0b11)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _check(_libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0), "Landlock")
    wishes = dict.fromkeys(readable, _READ_FILE | _READ_DIR) | {"/dev/null": _READ_FILE | _WRITE_FILE | _TRUNCATE}
    for path, wanted in wishes.items():
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not os.path.isdir(path):
            wanted &= _READ_FILE | _WRITE_FILE | _TRUNCATE
        rule = struct.pack("=Qi", wanted & rights, place)
        _check(_libc.syscall(_ADD_RULE, ruleset, 1, rule, 0), f"Landlock, {path}")
        os.close(place)
    return ruleset


def readable_places() -> list[str]:
    """Return the standard library without installed packages, locales and types of files, which it reads, folders of
    loaded shared libraries, and random bytes."""
    library = os.path.dirname(os.__file__)
    places = [entry.path for entry in os.scandir(library) if entry.name not in ("site-packages", "dist-packages")]
    with open("/proc/self/maps") as maps:
        mapped = {line.split(maxsplit=5)[5].strip() for line in maps if ".so" in line}
    # The folder, because neighbors may be needed too, but not a folder that contains the standard library.
    libraries = {
        path if library.startswith(os.path.dirname(path) + "/") else os.path.dirname(path)
        for path in mapped
        if not path.startswith(library) and "-packages" not in path
    }
    system = ["/usr/lib/locale", "/etc/mime.types", "/dev/urandom", "/dev/random", "/etc/ld.so.cache"]
    return [*places, *sorted(libraries), *system]


# --- Limits ---

MAX_OPEN_FILES = 64


def confine(ruleset: int | None, *, filter_calls: bool) -> None:
    """Give up rights over files (with rules of [`landlock_ruleset`]), of root, and to most system calls, irrevocably.
    The order matters: each step needs rights that later ones give up."""
    prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    if ruleset is not None:
        _check(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "Landlock")
        os.close(ruleset)
    header, none = struct.pack("=Ii", 0x2008_0522, 0), bytes(24)
    _check(_libc.capset(header, none), "capset")
    if filter_calls:
        machine = os.uname().machine
        rules = rules_for(machine, os.getpid(), may_open_for_writing=ruleset is not None)
        install_filter(assemble(rules, machine))


def missing_layers() -> dict[str, str]:
    """Return the layers that this machine does not have, with the reason."""
    missing = {}
    try:
        landlock_version()
    except OSError as error:
        missing["landlock"] = str(error)
    try:
        prctl(22, 2)  # without a filter: a bad address where filters can be installed
    except OSError as error:
        if error.errno != errno.EFAULT:
            missing["seccomp"] = str(error)
    if (machine := os.uname().machine) not in AUDIT_NAMES:
        missing["seccomp"] = f"there is no table of system calls for {machine}, only for {', '.join(AUDIT_NAMES)}"
    return missing


def close_other_files(*kept: int) -> None:
    """Close all files of this process but the first three and `kept`."""
    first = 3
    for file in sorted({*kept, MAX_OPEN_FILES}):
        os.closerange(first, file)
        first = file + 1


def set_limits(cpu_seconds: float, memory_limit_mb: int, output_limit_mb: int, *, bound_processes: bool) -> None:
    """Set the kernel's limits of this process; the number of processes only if no filter forbids creating them."""
    limits = {
        # Rounded up to seconds; the watching process enforces the exact limit.
        resource.RLIMIT_CPU: 1 - int(-cpu_seconds // 1),
        resource.RLIMIT_AS: memory_limit_mb << 20,
        resource.RLIMIT_FSIZE: output_limit_mb << 20,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_STACK: 64 << 20,
    }
    if bound_processes:
        limits[resource.RLIMIT_NPROC] = 512  # counts all threads of the user, and does not bind root
    for limit, value in limits.items():
        most = resource.getrlimit(limit)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (value, value))
