"""The system calls that environment code may make: a seccomp filter that allows those listed below,
some of them only with some arguments."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from environments.sandbox.kernel import checked, libc

PR_SET_SECCOMP = 22
# The instructions of the filter, as in linux/bpf_common.h.
LOAD = 0x20
AND = 0x54
EQUAL = 0x15
AT_LEAST = 0x35
RETURN = 0x06
ALLOW = 0x7FFF0000
REFUSE = 0x00050000
# Where the filter finds these in struct seccomp_data: of an argument, the lower half.
CALL_NUMBER = 0
ARCHITECTURE = 4
ARGUMENTS = (16, 24, 32)
WHOLE = 0xFFFFFFFF
AF_INET = 2
AF_INET6 = 10
SOCKET_TYPES = 0xF
SOCK_STREAM = 1
SOCK_SEQPACKET = 5
IPPROTO_TCP = 6
PRIO_PROCESS = 0
IOPRIO_WHO_PROCESS = 1
OF_A_PROCESS = (
    "sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr", "prlimit64",
)  # fmt: skip
"""What changes the process that its first argument names, 0 for the caller."""
NAMESPACES = 0x7E020000  # the flags of clone that ask for namespaces
LENGTH_FLAGS = os.O_ACCMODE | os.O_TRUNC
LENGTH_IS_KEPT = (0, 1, 2, 3, os.O_TRUNC | os.O_WRONLY, os.O_TRUNC | os.O_RDWR)
"""What these flags of an open may be where Landlock does not refuse to empty a file: only what asks
to write as well, which Landlock does refuse."""
CLONE3 = 435
"""Its flags are in memory, where no filter sees them. Where it is missing, programs call clone."""

Step = tuple[int, int, int, int]
"""Instruction, steps to skip if true, steps to skip if false, operand."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def filter_calls(
    *, allow_sockets: bool, allow_tcp: bool, has_processes: bool, allow_truncate: bool = True
) -> str:
    """Why system calls cannot be refused; "" if they are. `allow_tcp` allows TCP over IPv4 alone.
    Sockets of Unix are never allowed alone: they reach other programs through files.

    `has_processes`: the code has a PID namespace, so that it finds no process of others.
    `allow_truncate`: something else decides which files may be emptied."""
    try:
        architecture, calls = allowed_calls()
    except KeyError as machine:
        return f"the system calls of {machine} are not known here"
    steps = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        _refuse(errno.ENOSYS),
        (LOAD, 0, 0, CALL_NUMBER),
        *_for(CLONE3, [_refuse(errno.ENOSYS)]),
    ]
    families = (AF_INET, AF_INET6) if allow_sockets else ()
    # Connected pairs stay connected to themselves. Datagram sockets can send to any address.
    pairs = (SOCK_STREAM, SOCK_SEQPACKET)
    conditions = {
        "socket": _must(errno.EACCES, 0, *families),
        "socketpair": _must(errno.EACCES, 1, *pairs, mask=SOCKET_TYPES),
        "clone": _must(errno.EPERM, 0, 0, mask=NAMESPACES),
    }
    if allow_tcp:
        conditions["socket"] = [
            *_must(errno.EACCES, 0, AF_INET),
            *_must(errno.EACCES, 1, SOCK_STREAM, mask=SOCKET_TYPES),
            *_must(errno.EACCES, 2, 0, IPPROTO_TCP),
        ]
    if not has_processes:
        conditions |= dict.fromkeys(OF_A_PROCESS, _must(errno.EPERM, 0, 0))
        for name, kind in (("setpriority", PRIO_PROCESS), ("ioprio_set", IOPRIO_WHO_PROCESS)):
            conditions[name] = [*_must(errno.EPERM, 0, kind), *_must(errno.EPERM, 1, 0)]
    if not allow_truncate:
        conditions["truncate"] = [_refuse(errno.EACCES)]
        # Its flags are in memory. Where it is missing, programs call openat.
        conditions["openat2"] = [_refuse(errno.ENOSYS)]
        for place, name in enumerate(("open", "openat"), start=1):
            conditions[name] = _must(errno.EACCES, place, *LENGTH_IS_KEPT, mask=LENGTH_FLAGS)
    for name, number in calls.items():
        # The kernel remembers which calls need no look at their arguments.
        steps += _for(number, [*conditions.get(name, ()), (RETURN, 0, 0, ALLOW)])
    # A program takes a call that is newer than all of these for missing and does without.
    steps += [(AT_LEAST, 0, 1, max(calls.values())), _refuse(errno.ENOSYS), _refuse(errno.EPERM)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    program = _Program(len(steps), code)
    try:
        checked(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0))
    except OSError as error:
        return f"seccomp was refused: {error}"
    return ""


def _refuse(error: int) -> Step:
    return RETURN, 0, 0, REFUSE | error


def _for(number: int, steps: list[Step]) -> list[Step]:
    """The steps for one system call. They must end with a return."""
    return [(EQUAL, 0, len(steps), number), *steps]


def _must(error: int, place: int, *values: int, mask: int = WHOLE) -> list[Step]:
    """Refuse the call with `error` unless what the mask leaves of an argument is one of these."""
    steps: list[Step] = [(LOAD, 0, 0, ARGUMENTS[place]), (AND, 0, 0, mask)]
    for number, value in enumerate(values):
        steps.append((EQUAL, len(values) - number, 0, value))
    return [*steps, _refuse(error)]


# -- the system calls that environment code may make, from Docker's default profile ----------------
# Left out of that profile, because Landlock and the limits do not hold for them:
#
# - inotify_*, fanotify_mark: the names of files that others change, in folders that are hidden.
# - io_uring_*: it makes sockets past any filter.
# - name_to_handle_at, open_by_handle_at: a file by its number, past the folders that lead to it.
# - shm*, sem*, msg*, mq_*, memfd_secret: memory that is counted for nobody, outlives the processes
#   that made it, or may belong to others.
# - modify_ldt, get_thread_area, set_thread_area, personality: for programs of 32 bits.
#
# Left out as Docker does, for code without capabilities: kernel keys, namespaces and mounts, bpf,
# perf_event_open, userfaultfd, syslog, kcmp, pidfd_getfd, the placement of memory on nodes, modules
# and all that administers the machine.

# Files, waiting, sockets, memory, processes, users, the machine: a name with its numbers on x86_64
# and aarch64.
_TABLE = """
open 2 -, openat 257 56, openat2 437 437, creat 85 -, close 3 57, close_range 436 436,
read 0 63, pread64 17 67, readv 19 65, preadv 295 69, preadv2 327 286, write 1 64,
pwrite64 18 68, writev 20 66, pwritev 296 70, pwritev2 328 287, lseek 8 62, sendfile 40 71,
copy_file_range 326 285, splice 275 76, tee 276 77, vmsplice 278 75, readahead 187 213,
fadvise64 221 223, fallocate 285 47, truncate 76 45, ftruncate 77 46, sync 162 81,
syncfs 306 267, fsync 74 82, fdatasync 75 83, sync_file_range 277 84, dup 32 23, dup2 33 -,
dup3 292 24, fcntl 72 25, flock 73 32, ioctl 16 29, pipe 22 -, pipe2 293 59, stat 4 -,
fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, statfs 137 43, fstatfs 138 44,
access 21 -, faccessat 269 48, faccessat2 439 439, getdents 78 -, getdents64 217 61,
getcwd 79 17, chdir 80 49, fchdir 81 50, mkdir 83 -, mkdirat 258 34, rmdir 84 -, rename 82 -,
renameat 264 38, renameat2 316 276, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36,
readlink 89 -, readlinkat 267 78, unlink 87 -, unlinkat 263 35, mknod 133 -, mknodat 259 33,
umask 95 166, chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -,
fchown 93 55, lchown 94 -, fchownat 260 54, utime 132 -, utimes 235 -, futimesat 261 -,
utimensat 280 88, getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11,
llistxattr 195 12, flistxattr 196 13, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7,
removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, io_setup 206 0, io_destroy 207 1,
io_submit 209 2, io_cancel 210 3, io_getevents 208 4, io_pgetevents 333 292, cachestat 451 451,
poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1 291 20,
epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, eventfd 284 -,
eventfd2 290 19, signalfd 282 -, signalfd4 289 74, timerfd_create 283 85,
timerfd_settime 286 86, timerfd_gettime 287 87, futex 202 98, futex_waitv 449 449,
futex_wake 454 454, futex_wait 455 455, futex_requeue 456 456, nanosleep 35 101,
clock_nanosleep 230 115, pause 34 -, alarm 37 -, getitimer 36 102, setitimer 38 103,
timer_create 222 107, timer_settime 223 110, timer_gettime 224 108, timer_getoverrun 225 109,
timer_delete 226 111, time 201 -, gettimeofday 96 169, clock_gettime 228 113,
clock_getres 229 114, times 100 153, adjtimex 159 171, clock_adjtime 305 266,
socket 41 198, socketpair 53 199, bind 49 200, listen 50 201, accept 43 202, accept4 288 242,
connect 42 203, shutdown 48 210, getsockname 51 204, getpeername 52 205, getsockopt 55 209,
setsockopt 54 208, sendto 44 206, sendmsg 46 211, sendmmsg 307 269, recvfrom 45 207,
recvmsg 47 212, recvmmsg 299 243,
brk 12 214, mmap 9 222, mremap 25 216, munmap 11 215, mprotect 10 226, madvise 28 233,
mincore 27 232, msync 26 227, mlock 149 228, mlock2 325 284, mlockall 151 230, munlock 150 229,
munlockall 152 231, remap_file_pages 216 234, memfd_create 319 279, membarrier 324 283,
pkey_alloc 330 289, pkey_free 331 290, pkey_mprotect 329 288, map_shadow_stack 453 453,
mseal 462 462,
clone 56 220, fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, exit 60 93,
exit_group 231 94, wait4 61 260, waitid 247 95, getpid 39 172, getppid 110 173, gettid 186 178,
getpgid 121 155, getpgrp 111 -, getsid 124 156, setpgid 109 154, setsid 112 157,
set_tid_address 218 96, set_robust_list 273 99, get_robust_list 274 100, rseq 334 293,
arch_prctl 158 -, kill 62 129, tkill 200 130, tgkill 234 131,
pidfd_open 434 434, pidfd_send_signal 424 424, process_mrelease 448 448, rt_sigaction 13 134,
rt_sigprocmask 14 135, rt_sigpending 127 136, rt_sigsuspend 130 133, rt_sigtimedwait 128 137,
rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, rt_sigreturn 15 139, sigaltstack 131 132,
restart_syscall 219 128, ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271,
prctl 157 167, seccomp 317 277, landlock_create_ruleset 444 444, landlock_add_rule 445 445,
landlock_restrict_self 446 446,
getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148,
getresgid 120 150, getgroups 115 158, setuid 105 146, setgid 106 144, setreuid 113 145,
setregid 114 143, setresuid 117 147, setresgid 119 149, setfsuid 122 151, setfsgid 123 152,
setgroups 116 159, capget 125 90, capset 126 91,
getrlimit 97 163, setrlimit 160 164, prlimit64 302 261, getrusage 98 165, getpriority 140 141,
setpriority 141 140, ioprio_get 252 31, ioprio_set 251 30, sched_yield 24 124,
sched_getparam 143 121, sched_setparam 142 118, sched_getscheduler 145 120,
sched_setscheduler 144 119, sched_getattr 315 275, sched_setattr 314 274,
sched_getaffinity 204 123, sched_setaffinity 203 122, sched_get_priority_max 146 125,
sched_get_priority_min 147 126, sched_rr_get_interval 148 127, getcpu 309 168, uname 63 160,
sysinfo 99 179, getrandom 318 278
"""
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""As in linux/audit.h, in the order of the numbers in the table."""


def allowed_calls() -> tuple[int, dict[str, int]]:
    """This machine's architecture and {name: number}. KeyError if it is not known here."""
    architecture = _ARCHITECTURES[os.uname().machine]
    column = [*_ARCHITECTURES].index(os.uname().machine)
    calls: dict[str, int] = {}
    for row in _TABLE.split(","):
        name, *numbers = row.split()
        if numbers[column] != "-":
            calls[name] = int(numbers[column])
    return architecture, calls
