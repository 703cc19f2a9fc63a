"""The system calls that environment code may make, from Docker's default profile.

Left out of that profile, because Landlock and the limits do not hold for them:

- inotify_*, fanotify_mark: the names of files that others change, in folders that are hidden.
- io_uring_*: it makes sockets past any filter.
- name_to_handle_at, open_by_handle_at: a file by its number, past the folders that lead to it.
- shm*, sem*, msg*, mq_*, memfd_secret: memory that is counted for nobody, outlives the processes
  that made it, or may belong to others.
- modify_ldt, get_thread_area, set_thread_area, personality: for programs of 32 bits.

Left out as Docker does, for code without capabilities: kernel keys, namespaces and mounts, bpf,
perf_event_open, userfaultfd, syslog, kcmp, pidfd_getfd, the placement of memory on nodes, modules
and all that administers the machine.
"""

from __future__ import annotations

import os

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
