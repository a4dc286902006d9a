/* Runs one CPU candidate for a parent process that trusts nothing said here.
 *
 * usage: runner LIBRARY ENTRY THREADS TABLE SEGMENTS ARENA_FD COMMAND_FD ACK_FD [SIZES BUFFERS]
 *
 * SIZES, BUFFERS: how many the candidate takes, as docs/tasks.md says; a matrix product is called without them.
 * TABLE: offset in the arena of SEGMENTS rows, which say what of it is mapped; the first is the table itself.
 *
 * The order is the defence: segments mapped and threads started, then a seccomp filter that leaves a library
 * load and nothing else, then the candidate is loaded, then a filter that leaves only reading commands,
 * writing acknowledgements and futexes. The parent owns the clock, the inputs and the reference; an
 * acknowledgement repeats the number that came with the command, so that none can be sent in advance, and what it
 * is worth the parent finds in the arena. */
#define _GNU_SOURCE
#include <stdint.h>
static void watch_control(void);
static void wait_awhile(uint32_t generation);
#define BEFORE_TASKS wait_awhile
#define AFTER_TASKS watch_control()
#include "pool.c"

#include <dlfcn.h>
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

#define LEFT_PARALLEL_FOR 4 /* exit statuses, as worker.py knows them */
#define CHANGED_CONTROL 5
#define WROTE_INPUT 6
#define OUTSIDE 7
#define ROUNDS 16
#define NEAR ((int64_t)1 << 30) /* bytes: a fault so far from the arena is one of it */

static int command_fd = -1, ack_fd = 2;
static _Atomic uint64_t most_apart, drawn; /* ticks; the state of random numbers */
static uint64_t share_apart, rounds;       /* of a round's ticks, in 2^-16; rounds of this launch */
static int64_t steps, said_nonce;

/* Begin a round's first task later than other threads, by a random time: parts of tasks meet that else never do. */
static void wait_awhile(uint32_t generation) {
    uint64_t apart = atomic_load(&most_apart);
    if (!apart) return;
    uint64_t mixed = (atomic_fetch_add(&drawn, 0x9e3779b97f4a7c15) ^ generation) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ mixed >> 31) * 0x94d049bb133111eb;
    uint64_t wait = (mixed >> 20) % apart;
    for (uint64_t start = ticks(); ticks() - start < wait;) RELAX();
}

static void read_all(void *to, size_t size);
static void fail(const char *what, const char *why);

/* Say where a launch in steps is, and above which address its caller's stack lies, and wait for the answer. */
enum { ROUND = 1, BEFORE, BEHIND };
static void step(int64_t what, void *frame) {
    int64_t said[2] = {said_nonce ^ what, (int64_t)frame}, answer;
    if (write(ack_fd, said, sizeof said) != sizeof said) fail("write", strerror(errno));
    read_all(&answer, sizeof answer);
}

static void in_steps(int64_t count, task_fn task, void *context, void *frame) {
    if (count < 1) return;
    step(ROUND, frame);
    for (int64_t index = 0, first = (int64_t)((uint64_t)said_nonce >> 1) % count; index < count; ++index) {
        int met = (index + count - first) % count < steps; /* those that follow one, drawn */
        if (met) step(BEFORE, frame);
        task(context, index);
        if (met) step(BEHIND, frame);
    }
}

/* What candidates are given, timed or not: one function, so that nothing tells. */
static void parallel_for(int64_t count, task_fn task, void *context) {
    if (steps) {
        in_steps(count, task, context, (char *)__builtin_frame_address(0) + 2 * sizeof(void *));
        return;
    }
    static uint64_t taken[ROUNDS]; /* the least ticks of a launch's first rounds, by their number */
    if (!share_apart) {
        pool_parallel_for(count, task, context);
        return;
    }
    uint64_t *least = &taken[rounds++ % ROUNDS], start = ticks();
    atomic_store(&most_apart, *least * share_apart >> 16);
    pool_parallel_for(count, task, context);
    uint64_t took = ticks() - start;
    if (!*least || took < *least) *least = took;
}

typedef void (*gemm_fn)(int64_t m, int64_t n, int64_t k, const uint16_t *a, const uint16_t *b, uint16_t *c,
                        void *workspace, void (*parallel_for)(int64_t, task_fn, void *));

/* One launch, offsets into the arena; the parent writes the table before the command. */
struct call { int64_t m, n, k, a, b, c, workspace; };
/* A negative count: tasks in reverse order. apart: threads begin up to this share of a round apart, in 2^-16. steps: on
 * one thread, which stops before and behind this many tasks of a round at most; 0 for none. */
struct command { int64_t table, count, base, apart, steps, nonce; };

/* What is mapped of the arena, in whole pages; the rest is reserved and faults. */
struct segment { int64_t start, stop, writable; };
#define BASES 3 /* high, right below the libraries; near the heap; low */
static char *arenas[BASES];
static int64_t arena_bytes, segment_count;
static struct segment *segments;

/* For tasks a row of the table is the sizes, the buffers' offsets, the workspace's offset. */
typedef void (*task_entry_fn)(const int64_t *sizes, void *const *buffers, void *workspace,
                              void (*parallel_for)(int64_t, task_fn, void *));
#define MAX_SIZES 2048
#define MAX_BUFFERS 128

#if defined(__x86_64__)
#define ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCH AUDIT_ARCH_AARCH64
#else
#error "the runner knows seccomp's architecture constants for x86-64 and 64-bit Arm"
#endif

static void fail(const char *what, const char *why) {
    dprintf(ack_fd, "E%-7.7s%s: %s\n", "", what, why);
    exit(3);
}

/* Allow the listed system calls, write to ack_fd alone, kill the process on any other. */
static void restrict_to(const int *allowed, int count) {
    struct sock_filter code[80];
    int n = 0;
#define ADD(...) code[n++] = (struct sock_filter)__VA_ARGS__
    ADD(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)));
    ADD(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCH, 1, 0));
    ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS));
    ADD(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)));
    for (int i = 0; i < count; ++i) {
        ADD(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)allowed[i], 0, 1));
        ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    }
    ADD(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_write, 0, 3));
    ADD(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])));
    ADD(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)ack_fd, 0, 1));
    ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS));
    struct sock_fprog program = {.len = (unsigned short)n, .filter = code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
        syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program))
        fail("seccomp", strerror(errno));
}

static const int to_load[] = {
    SYS_openat, SYS_read,   SYS_pread64, SYS_close, SYS_fstat,      SYS_newfstatat,   SYS_mmap,         SYS_mprotect,
    SYS_munmap, SYS_brk,    SYS_futex,   SYS_exit,  SYS_exit_group, SYS_rt_sigreturn, SYS_sched_yield,  SYS_getrandom,
    SYS_lseek,  SYS_seccomp, SYS_prctl,
#ifdef SYS_readlink
    SYS_readlink, SYS_stat, SYS_access,
#endif
};
static const int to_run[] = {SYS_read, SYS_futex, SYS_exit, SYS_exit_group, SYS_rt_sigreturn, SYS_sched_yield};
#define COUNT(array) (int)(sizeof(array) / sizeof(*array))

static void read_all(void *to, size_t size) {
    for (size_t done = 0; done < size;) {
        ssize_t got = read(command_fd, (char *)to + done, size - done);
        if (got == 0) exit(0);
        if (got < 0 && errno != EINTR) fail("read", strerror(errno));
        if (got > 0) done += (size_t)got;
    }
}

/* How this thread rounds, what it flushes to zero and which exceptions stop it. The flags that arithmetic raises are
 * set at random: a launch could tell the next one something by them, and a caller's may be any. */
static uint64_t float_control(void) {
    static _Thread_local uint32_t drawn;
    drawn = (drawn ^ (uint32_t)((uintptr_t)&command_fd >> 12)) * 1664525u + 1013904223u;
#if defined(__x86_64__)
    uint32_t vectors, word = 0;
    __asm__ volatile("stmxcsr %0\n\tfnstcw %1" : "=m"(vectors), "=m"(word));
    vectors = (vectors & ~0x3fu) | drawn >> 26;
    __asm__ volatile("ldmxcsr %0" : : "m"(vectors));
    return (uint64_t)(word & 0xffff) << 32 | (vectors & ~0x3fu);
#else
    uint64_t control;
    __asm__ volatile("mrs %0, fpcr\n\tmsr fpsr, %1" : "=&r"(control) : "r"((uint64_t)(drawn >> 27)));
    return control;
#endif
}

static uint64_t control; /* of every thread: the caller's arithmetic and the next task's go on */

static void watch_control(void) {
    if (float_control() != control) _exit(CHANGED_CONTROL);
}

/* Name a fault in the arena by the exit status; another ends the process by its signal once it comes again. */
static void faulted(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    for (int base = 0; base < BASES; ++base) {
        int64_t at = (char *)info->si_addr - arenas[base];
        if (at < -NEAR || at >= arena_bytes + NEAR) continue;
        for (int64_t i = 0; i < segment_count; ++i)
            if (at >= segments[i].start && at < segments[i].stop) _exit(WROTE_INPUT);
        _exit(OUTSIDE);
    }
}

/* Where the arena is to lie. Tensors of a user lie behind the program, in its heap, or high among the libraries, as
 * their sizes are: above a kernel's code or below it. The system may choose another address. */
static char *wanted(int base) {
    uint64_t drawn, page = (uint64_t)sysconf(_SC_PAGESIZE), heap = (uint64_t)(uintptr_t)sbrk(0);
    if (base == 0 || syscall(SYS_getrandom, &drawn, sizeof drawn, 0) != sizeof drawn) return 0;
    uint64_t low = NEAR, room = heap > (uint64_t)(arena_bytes + 2 * NEAR) ? heap - (uint64_t)(arena_bytes + 2 * NEAR) : 1;
    if (base == 1) low = heap + NEAR, room = (uint64_t)1 << 39;
    return (char *)(uintptr_t)((low + drawn % room) / page * page);
}

/* Reserve the arena and map its segments with their pages, so that no launch waits for one. */
static void map_arena(int fd, int64_t table) {
    segments = malloc((size_t)segment_count * sizeof *segments);
    if (!segments) fail("arena", strerror(errno));
    if (pread(fd, segments, (size_t)segment_count * sizeof *segments, table) < 0) fail("arena", strerror(errno));
    for (int base = 0; base < BASES; ++base) {
        char *arena = mmap(wanted(base), (size_t)arena_bytes, PROT_NONE, MAP_SHARED, fd, 0);
        if (arena == MAP_FAILED) fail("arena", strerror(errno));
        arenas[base] = arena;
        for (int64_t i = 0; i < segment_count; ++i) {
            char *start = arena + segments[i].start;
            size_t bytes = (size_t)(segments[i].stop - segments[i].start);
            if (mprotect(start, bytes, PROT_READ | (segments[i].writable ? PROT_WRITE : 0)))
                fail("arena", strerror(errno));
            /* older systems map when first used */
            madvise(start, bytes, segments[i].writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
        }
    }
    struct sigaction action = {.sa_sigaction = faulted, .sa_flags = (int)(SA_SIGINFO | SA_RESETHAND)};
    if (sigaction(SIGSEGV, &action, 0) || sigaction(SIGBUS, &action, 0)) fail("signals", strerror(errno));
}

static void launch_gemm(void *entry, char *arena, const struct call *row) {
    struct call call = *row;
    ((gemm_fn)entry)(call.m, call.n, call.k, (const uint16_t *)(arena + call.a), (const uint16_t *)(arena + call.b),
                     (uint16_t *)(arena + call.c), arena + call.workspace, parallel_for);
}

/* Sizes and pointers are copied out of the arena, afresh for every launch. */
static void launch_task(void *entry, char *arena, const int64_t *row, int size_count, int buffer_count) {
    int64_t sizes[MAX_SIZES];
    void *buffers[MAX_BUFFERS];
    memcpy(sizes, row, (size_t)size_count * sizeof *sizes);
    for (int i = 0; i < buffer_count; ++i) buffers[i] = arena + row[size_count + i];
    ((task_entry_fn)entry)(sizes, buffers, arena + row[size_count + buffer_count], parallel_for);
}

int main(int argc, char **argv) {
    if (argc != 9 && argc != 11)
        fail("usage", "runner LIBRARY ENTRY THREADS TABLE SEGMENTS ARENA_FD COMMAND_FD ACK_FD [SIZES BUFFERS]");
    int task = argc == 11, size_count = task ? atoi(argv[9]) : 0, buffer_count = task ? atoi(argv[10]) : 0;
    if (size_count < 0 || size_count > MAX_SIZES || buffer_count < 0 || buffer_count > MAX_BUFFERS)
        fail("usage", "too many sizes or buffers");
    int arena_fd = atoi(argv[6]);
    command_fd = atoi(argv[7]);
    ack_fd = atoi(argv[8]);
    struct stat info;
    if (fstat(arena_fd, &info)) fail("arena", strerror(errno));
    arena_bytes = info.st_size;
    segment_count = atoll(argv[5]);
    map_arena(arena_fd, atoll(argv[4]));
    close(arena_fd);
    control = float_control();
    int error = pool_start(atoi(argv[3]), 1);
    if (error) fail("threads", strerror(error));

    restrict_to(to_load, COUNT(to_load));
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) fail("load", dlerror());
    void *entry = dlsym(library, argv[2]);
    if (!entry) fail("load", dlerror());
    restrict_to(to_run, COUNT(to_run));

    if (write(ack_fd, "Rready..", 8) != 8) return 1;
    for (;;) {
        struct command command;
        read_all(&command, sizeof command);
        const int64_t *table = (const int64_t *)(arenas[0] + command.table);
        char *arena = arenas[(uint64_t)command.base % BASES];
        pool.reversed = command.count < 0;
        atomic_store(&most_apart, 0);
        atomic_store(&drawn, (uint64_t)command.nonce);
        share_apart = (uint64_t)command.apart;
        steps = command.steps;
        said_nonce = command.nonce;
        for (int64_t i = 0; i < llabs(command.count); ++i) {
            rounds = 0;
            if (task) launch_task(entry, arena, table + i * (size_count + buffer_count + 1), size_count, buffer_count);
            else launch_gemm(entry, arena, (const struct call *)table + i);
            /* who jumps out of it leaves tasks behind, which would go on while nothing is timed */
            if (atomic_load(&pool.unfinished) > 0) return LEFT_PARALLEL_FOR;
            watch_control();
        }
        if (write(ack_fd, &command.nonce, sizeof command.nonce) != sizeof command.nonce) return 1;
    }
}
