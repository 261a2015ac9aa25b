/* Which processes are alive. A process holds a lock on a byte of the region for as long as it lives, which can be tested from any
 * pid namespace and by any user. Where the lock is free, /proc of the observer's own pid namespace is consulted too: a program
 * may have closed the descriptor that holds the lock. */
#include "aim.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static uint32_t own_pid;
static uint64_t own_ticks, own_namespace;

enum { GONE = 0, UNKNOWN = 1 };

static const char *skip_fields(const char *at, int count)
{
    for (int i = 0; at != NULL && i < count; i++)
        at = strchr(at + 1, ' ');
    return at;
}

static uint64_t number_at(const char *at)
{
    uint64_t value = 0;
    for (at++; *at >= '0' && *at <= '9'; at++)
        value = value * 10 + (uint64_t)(*at - '0');
    return value;
}

/* Start time of a process in ticks since boot, GONE or UNKNOWN. Read from its first thread's file, which has the same value:
 * qemu-user provides a /proc/PID/stat of its own for the reading process only. */
static uint64_t start_ticks(unsigned pid)
{
    char path[48], text[1024];
    snprintf(path, sizeof path, "/proc/%u/task/%u/stat", pid, pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return errno == ENOENT || errno == ESRCH ? GONE : UNKNOWN;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0)
        return GONE;
    text[length] = 0;
    const char *name_end = strrchr(text, ')'); /* the name may contain anything */
    const char *threads = skip_fields(name_end, 18), *started = skip_fields(name_end, 20);
    if (name_end == NULL || threads == NULL || started == NULL)
        return GONE;
    int is_zombie = name_end[1] == ' ' && (name_end[2] == 'Z' || name_end[2] == 'X');
    if (is_zombie && number_at(threads) <= 1)
        return GONE; /* with more threads, only its main thread has ended */
    return number_at(started);
}

static void refresh(void)
{
    uint32_t pid = (uint32_t)getpid();
    if (load(&own_pid) == pid)
        return;
    struct stat status;
    if (syscall(SYS_newfstatat, AT_FDCWD, "/proc/self/ns/pid", &status, 0) == 0)
        store(&own_namespace, (uint64_t)status.st_ino);
    store(&own_ticks, start_ticks(pid));
    store(&own_pid, pid);
}

void aim_life_start(void) { refresh(); }

uint32_t aim_own_pid(void)
{
    refresh(); /* a child made by a bare clone runs no handlers */
    return load(&own_pid);
}

int aim_is_own_process(const struct aim_process *process)
{
    refresh();
    return load(&process->pid) == load(&own_pid) && load(&process->start_ticks) == load(&own_ticks) &&
           load(&process->pid_namespace) == load(&own_namespace);
}

void aim_life_describe(struct aim_process *process)
{
    refresh();
    store(&process->pid, load(&own_pid));
    store(&process->start_ticks, load(&own_ticks));
    store(&process->pid_namespace, load(&own_namespace));
}

static struct flock life_byte(const struct aim_share *share, const struct aim_process *process, short type)
{
    uint64_t slot = (uint64_t)(process - share->tenant->processes);
    return (struct flock){
        .l_type = type,
        .l_whence = SEEK_SET,
        .l_start = (off_t)(AIM_LIFE + share->index * AIM_PROCESSES + slot),
        .l_len = 1,
    };
}

int aim_life_hold(struct aim_share *share, const struct aim_process *process)
{
    struct flock former = {.l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = AIM_LIFE, .l_len = AIM_SENDER_LIFE - AIM_LIFE};
    struct flock range = life_byte(share, process, F_WRLCK);
    fcntl(share->descriptor, F_OFD_SETLK, &former); /* of a slot that this process had before */
    return fcntl(share->descriptor, F_OFD_SETLK, &range) == 0;
}

static int is_locked(const struct aim_share *share, const struct aim_process *process)
{
    struct flock range = life_byte(share, process, F_WRLCK);
    return fcntl(share->descriptor, F_OFD_GETLK, &range) != 0 || range.l_type != F_UNLCK; /* cannot test: alive */
}

int aim_is_alive(const struct aim_share *share, const struct aim_process *process)
{
    refresh();
    if (is_locked(share, process))
        return 1;
    if (load(&process->pid_namespace) != load(&own_namespace))
        return 0;
    uint64_t ticks = start_ticks(load(&process->pid));
    return ticks == UNKNOWN || ticks == load(&process->start_ticks);
}
